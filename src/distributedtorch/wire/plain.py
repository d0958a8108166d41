"""Sums that travel as they are: 2B(N-1)/N bytes per rank for B bytes over N ranks, nothing left out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.wire import Wire


class Plain(Wire):
    """Numbers in their own type."""

    lossy = False

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        return self.comm.all_reduce(name, flat, bounds)

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        return self.comm.reduce_scatter(name, flat, bounds, out)
