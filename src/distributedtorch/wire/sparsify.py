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

from distributedtorch.core.wire import PIECE, WHOLE, Code, Noise, pack, unpack

_SAMPLE = 64
"""One of so many numbers is looked at to guess where the largest begin."""


class _Some(Code):
    """A part of the numbers."""

    feedback = True
    piece = WHOLE

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

    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        return self.decode(code, numel, dtype, key)


class TopK(_Some):
    """The numbers that are largest without their signs."""

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * (4 + dtype.itemsize)

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        places = _largest_places(values, self.count(values.numel()))
        return pack(places.to(torch.int32), values[places])

    def read(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
        count = self.count(numel)
        places, values = unpack(code, (count, torch.int32), (count, dtype))
        return places.long(), values


class RandomK(_Some):
    """Numbers at places that all ranks draw alike: one out of every stretch of equal length."""

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * dtype.itemsize

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        return pack(values[self.places(values.numel(), key).to(values.device)])

    def read(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
        values = unpack(code, (self.count(numel), dtype))[0]
        return self.places(numel, key).to(code.device), values

    def places(self, numel: int, key: int) -> Tensor:
        """Where: the same for the same key."""
        count = self.count(numel)
        ends = torch.arange(count + 1) * numel // max(count, 1)
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
        return ends[:-1] + (drawn * ends.diff()).long()


def _largest_places(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest are, without their signs.

    Of many numbers only those are sorted that are not below a bound, which a sample gives: what is not a number is
    among them. Where they are fewer than asked for, or very many, all are sorted.
    """
    if values.numel() > 4 * PIECE and values.device.type == "cpu":
        sample = values[::_SAMPLE].abs()
        bound = sample.topk(min(len(sample), 2 * count // _SAMPLE + 1), sorted=False).values.amin()
        pieces = enumerate(values.split(PIECE))
        found = torch.cat([(~(piece.abs() < bound)).nonzero().view(-1) + number * PIECE for number, piece in pieces])
        if count <= len(found) < values.numel() // 4:
            return found[values[found].abs().topk(count, sorted=False).indices]
    return values.abs().topk(count, sorted=False).indices
