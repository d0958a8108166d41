"""A few of the numbers: the largest, or some drawn at random; what is left out is kept for the next time.

Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, and Lin et al., "Deep Gradient
Compression", ICLR 2018 (the largest); Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (both, and why they
converge).

Bytes for a part r of float32 numbers: 2r of theirs for topk (a place and a value each), r for randomk, whose places
all ranks draw alike. Needs as much memory for what was left out as the gradients have. Use topk with r near 0.01 where
links are slow; randomk where finding the largest costs too much, with a larger r.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from distributedtorch.core.wire import Code

_MANY, _STRETCH = 1 << 20, 1 << 18
"""From how many numbers on a bound is guessed first, and how many are looked at together then."""
_SAMPLE = 61
"""One of so many numbers is looked at to guess where the largest begin; no width of a layer is a multiple of it."""


class _Some(Code):
    """A part of the numbers."""

    feedback = True

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def count(self, numel: int) -> int:
        """How many travel of so many."""
        return min(numel, max(1, round(self.ratio * numel)))

    @abstractmethod
    def read(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
        """Places, each once, and the values there."""

    def put(self, code: Tensor, out: Tensor, key: int) -> None:
        out.zero_()
        self.add(code, out, key)

    def add(self, code: Tensor, out: Tensor, key: int, *, times: int = 1) -> None:
        out.index_add_(0, *self.read(code, out.numel(), out.dtype, key), alpha=times)


class TopK(_Some):
    """The numbers that are largest without their signs."""

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * (4 + dtype.itemsize)

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        places = _largest_places(values, self.count(values.numel()))
        return torch.cat([places.to(torch.int32).view(torch.uint8), values[places].view(torch.uint8)])

    def read(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
        end = 4 * self.count(numel)
        return code[:end].clone().view(torch.int32).long(), code[end:].clone().view(dtype)  # addresses that fit types


class RandomK(_Some):
    """Numbers at places that all ranks draw alike, each place as likely as any: one out of every stretch of them."""

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * dtype.itemsize

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        return values[self.places(values.numel(), key).to(values.device)].view(torch.uint8)

    def read(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
        return self.places(numel, key).to(code.device), code.clone().view(dtype)

    def places(self, numel: int, key: int) -> Tensor:
        """Where: the same for the same key. Where the first stretch begins is drawn too."""
        count, draw = self.count(numel), torch.Generator().manual_seed(key)
        ends = torch.arange(count + 1) * numel // max(count, 1) + torch.randint(max(numel, 1), (), generator=draw)
        drawn = torch.rand(count, generator=draw, dtype=torch.float64)
        return (ends[:-1] + (drawn * ends.diff()).long()) % max(numel, 1)


def _largest_places(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest are, without their signs.

    Of many numbers only those are sorted that are not below a bound, which a sample gives: what is not a number is
    among them. Where the bound is zero, or they are fewer than asked for or very many, all are sorted.
    """
    most = values.numel() // 4
    if values.numel() > _MANY and 4 * count < most and values.device.type == "cpu":
        sample = values[::_SAMPLE].abs()
        bound = sample.topk(2 * count // _SAMPLE + 1, sorted=False).values.amin()
        found: list[Tensor] = []
        for number, piece in enumerate(values.split(_STRETCH) if bound > 0 else ()):
            found.append((~(piece.abs() < bound)).nonzero().view(-1) + number * _STRETCH)
            if sum(map(len, found)) > most:
                break
        if count <= sum(map(len, found)) <= most:
            places = torch.cat(found)
            return places[values[places].abs().topk(count, sorted=False).indices]
    return values.abs().topk(count, sorted=False).indices
