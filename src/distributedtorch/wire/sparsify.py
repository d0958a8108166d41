"""A few of the numbers: the largest, or some drawn at random; what is left out is kept for the next time.

Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, and Lin et al., "Deep Gradient
Compression", ICLR 2018 (the largest); Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (both, and why they
converge).

Bytes for a part r of float32 numbers: 2r of theirs for topk (a place and a value each), r for randomk, whose places
all ranks draw alike. Needs as much memory for what was left out as the gradients have. Use topk with r near 0.01 where
links are slow; randomk where finding the largest costs too much, with a larger r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributedtorch.core.wire import Code, pack, unpack


class _Some(Code):
    """A part of the numbers."""

    feedback = True

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def count(self, numel: int) -> int:
        """How many travel of so many."""
        return min(numel, max(1, round(self.ratio * numel)))


class TopK(_Some):
    """The numbers that are largest without their signs."""

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * (4 + dtype.itemsize)

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        places = values.abs().topk(self.count(values.numel()), sorted=False).indices
        return pack(places.to(torch.int32), values[places])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        count = self.count(numel)
        places, values = unpack(code, (count, torch.int32), (count, dtype))
        return torch.zeros(numel, dtype=dtype, device=code.device).index_put_((places.long(),), values)


class RandomK(_Some):
    """Numbers at places that all ranks draw alike."""

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.count(numel) * dtype.itemsize

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        return pack(values[self.places(values.numel(), key).to(values.device)])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        values = unpack(code, (self.count(numel), dtype))[0]
        places = self.places(numel, key).to(code.device)
        return torch.zeros(numel, dtype=dtype, device=code.device).index_put_((places,), values)

    def places(self, numel: int, key: int) -> Tensor:
        """Where: the same for the same key."""
        return torch.randperm(numel, generator=torch.Generator().manual_seed(key))[: self.count(numel)]
