"""Sums in two steps: over the ranks that divide a replica, and then over those that have the same piece in the others.

Travels per rank, for B bytes over R replicas of S ranks: B(S-1)/S inside, 2(B/S)(R-1)/R across. Where a replica lies on
one host, only the second goes from host to host. Every sum is taken in a fixed order: replicas have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.wire import Wire
from distributedtorch.wire.twice import Twice, go_on


class Twofold(Wire):
    """Numbers in their own type, summed inside a replica and across replicas."""

    lossy = False

    def __init__(self, inside: Comm, across: Comm) -> None:
        self.inside, self.across = inside, across
        self.begun: deque[Twice] = deque()
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
        return go_on(Twice(across, name, first, lambda: across.all_reduce(name, piece, cuts), self.begun))
