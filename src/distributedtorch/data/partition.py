"""Which rows of a global batch belong to which rank: contiguous pieces, sizes differing by at most one.

Each rank holds `total / world` rows; the first `total % world` ranks hold one more. Concatenating the ranks' pieces
in rank order gives the global batch back, row for row. Nothing travels: every rank computes its piece by itself.
Use it for any batch; where ranks differ in speed or memory, a `Division` (`shares`) gives them unequal pieces.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from distributedtorch.data.shares import Division


def rows(total: int, world: int, rank: int) -> range:
    """The rows of a batch of `total` that belong to `rank` out of `world`; none when rows are too few."""
    assert total >= 0 and 0 <= rank < world, (total, world, rank)
    each, extra = divmod(total, world)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def sizes(total: int, world: int) -> str:
    """The pieces as text: `16 + 16`, `17 + 16`, and from five ranks on `2 x 33 + 6 x 32`."""
    return written([len(rows(total, world, rank)) for rank in range(world)])


def written(counts: Sequence[int]) -> str:
    """Rows by rank as text; from five ranks on, how many ranks have how many."""
    if len(counts) <= 4:
        return " + ".join(map(str, counts))
    return " + ".join(f"{counts.count(size)} x {size}" for size in sorted(set(counts), reverse=True))


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's place in the division, and how it is applied to one batch."""

    rank: int
    world: int
    reverse: bool = False
    """Reverse the rows inside each global batch before dividing: same mean, other rounding."""
    division: Division | None = None
    """Who takes how many rows of which batch; None: all the same."""
    dims: int | tuple[int, ...] = 0
    """The dimension of a finished batch's tensors that has the rows, or one for each tensor, in order."""
    copies: int = 1
    """How many ranks take each row: all of them where batches stay whole, as in an evaluation."""

    @property
    def whole(self) -> bool:
        """Whether a batch passes unchanged."""
        return self.world == self.copies and not self.reverse

    def undivided(self) -> Part:
        """The part of a rank that takes all rows, like every other."""
        return replace(self, division=None, copies=self.world)

    @property
    def note(self) -> str:
        """How rows are divided, if not equally."""
        return "" if self.division is None else "; shares follow measured speed"

    def sizes(self, total: int) -> str:
        """The pieces of a batch as text."""
        if self.division is None:
            return sizes(total, self.world)
        return written(self.division.counts(total, self.division.drawn))

    def rows(self, total: int, number: int) -> range:
        """This rank's rows of global batch `number`; none when rows are too few."""
        if self.copies == self.world:
            return range(total)
        if self.division is None:
            return rows(total, self.world, self.rank)
        return self.division.rows(total, number, self.rank)

    def take(self, items: Sequence[Any], number: int = 0) -> tuple[float, int, Sequence[Any]]:
        """Divide the indices or samples of global batch `number`.

        Returns:
            Real rows of this rank (its share of those that several have), rows of the global batch, and this rank's
            items (item 0 when it has none).
        """
        if not isinstance(items, Sized):
            items = list(items)
        total = len(items)
        if self.whole or total == 0:
            return self.share(total), total, items
        ordered = list(items)[:: -1 if self.reverse else 1]
        mine = self.rows(total, number)
        span = stand_in(mine)
        return self.share(len(mine)), total, ordered[span.start : span.stop]

    def share(self, rows: int) -> float:
        """What so many rows here count for."""
        return rows if self.copies == 1 else rows / self.copies


def stand_in(mine: range) -> range:
    """A rank's rows; row 0 stands in (and counts for nothing) where it has none."""
    return mine or range(1)
