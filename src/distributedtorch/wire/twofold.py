"""Sums in two steps: over the ranks that divide a replica, and then over those that have the same piece in the others.

Travels per rank, for B bytes over R replicas of S ranks: B(S-1)/S inside, 2(B/S)(R-1)/R across. Where a replica lies on
one host, only the second goes from host to host. Every sum is taken in a fixed order: replicas have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.wire import Wire


class Twofold(Wire):
    """Numbers in their own type, summed inside a replica and across replicas."""

    lossy = False

    def __init__(self, inside: Comm, across: Comm) -> None:
        self.inside, self.across = inside, across
        self.begun: deque[_Twice] = deque()
        """Sums whose second step has not begun."""

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        raise AssertionError("ranks own pieces: plans that divide nothing have no replicas")

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        place, across = self.inside.rank, self.across
        piece = flat[bounds[place] : bounds[place + 1]] if out is None else out
        cuts = [piece.numel() * k // across.world for k in range(across.world + 1)]
        across.pairs.meet(name)
        first = self.inside.reduce_scatter(name, flat, bounds, out)
        if not piece.numel():
            across.whole.count += 1  # as those that have something to sum
            return first
        made = _Twice(across, name, first, lambda: across.all_reduce(name, piece, cuts), self.begun)
        self.begun.append(made)
        self._go_on()
        return made

    def _go_on(self) -> None:
        """Begin second sums whose first one is done, in order; not where only a stream knows, which would be held."""
        for one in list(self.begun):
            if (one.first.work is None and not self.inside.alone) or not one.starts():
                break


class _Twice(Pending):
    """A sum inside and then across; the second begins when someone, or the next bucket, finds the first done."""

    def __init__(
        self, comm: Comm, name: str, first: Pending, begin: Callable[[], Pending], begun: deque[_Twice]
    ) -> None:
        super().__init__(comm, "all-reduce", name)
        self.first, self.begin, self.begun = first, begin, begun
        self.second: Pending | None = None

    def _go_on(self) -> Pending:
        if self.second is None:
            self.first.wait()
            self.second = self.begin()
            self.begun.remove(self)
        return self.second

    def starts(self) -> bool:
        """Begin the second sum if the first is done. Result: whether it has begun."""
        if self.second is None and self.first.arrived():
            self._go_on()
        return self.second is not None

    def arrived(self) -> bool:
        return self.starts() and self._go_on().arrived()

    def advance(self) -> None:
        self._go_on()

    def wait(self) -> None:
        second = self._go_on()
        second.advance()
        second.wait()
