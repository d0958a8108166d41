"""A tensor in nine numbers: its 2-norm and its inner products with eight fixed pseudo-random vectors.

Johnson & Lindenstrauss 1984; signs per chunk as in Alon, Matias & Szegedy 1996.

The inner products are linear, so those of two tensors give the 2-norm of their difference: the root mean square of
eight differences estimates it without bias, and is off by more than a factor of four about once in ten thousand. A
difference anywhere in the tensor shows. The same vectors are used in every run and on every rank; they are one block of
normal numbers, with a random sign for each chunk that is as long as the block, so that nothing large is kept or drawn.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

NUM_VECTORS = 8
_BLOCK = 1 << 14
_CHUNKS = 64
_SEED = 20240229


def sketch(name: str, tensor: Tensor) -> list[float]:
    """The 2-norm of `tensor` and its eight inner products; `name` decides the signs."""
    flat = plain(tensor).reshape(-1)
    signs = _signs(name, -(-flat.numel() // _BLOCK))
    square, products = 0.0, torch.zeros(NUM_VECTORS, dtype=torch.float64)
    for start in range(0, flat.numel(), _BLOCK * _CHUNKS):
        part = flat[start : start + _BLOCK * _CHUNKS].double()
        square += float(part.square().sum())
        width = min(_BLOCK, part.numel())
        padded = torch.nn.functional.pad(part, (0, -part.numel() % width)).view(-1, width)
        first = start // _BLOCK
        products += (padded @ _block()[:width] * signs[first : first + len(padded)]).sum(dim=0)
    return [math.sqrt(square) if square >= 0 else math.nan, *products.tolist()]


def plain(tensor: Tensor) -> Tensor:
    """A dense real tensor of its own on the host; a gradient that is divided over ranks is gathered by the copy."""
    whole = (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone().cpu()
    return torch.view_as_real(whole) if whole.is_complex() else whole


def norm(one: Sequence[float]) -> float:
    """The 2-norm of a sketched tensor."""
    return one[0]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """An estimate of the 2-norm of the difference of two sketched tensors of one name."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)) / NUM_VECTORS)


@functools.cache
def _block() -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(_BLOCK, NUM_VECTORS, dtype=torch.float64, generator=generator)


def _signs(name: str, chunks: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, (chunks, NUM_VECTORS), generator=generator).double() * 2 - 1
