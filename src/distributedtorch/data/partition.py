"""Which rows of a global batch belong to which rank: contiguous pieces, sizes differing by at most one.

Each rank holds `total / world` rows; the first `total % world` ranks hold one more. Concatenating the ranks' pieces
in rank order gives the global batch back, row for row. Nothing travels: every rank computes its piece by itself.
Use it for any batch; when ranks differ in speed, an unequal partition would be the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any


def rows(total: int, world: int, rank: int) -> range:
    """The rows of a batch of `total` that belong to `rank` out of `world`; none when rows are too few."""
    assert total >= 0 and 0 <= rank < world, (total, world, rank)
    each, extra = divmod(total, world)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def sizes(total: int, world: int) -> str:
    """The pieces as text: `16 + 16`, `17 + 16`, and from five ranks on `2 x 33 + 6 x 32`."""
    counts = [len(rows(total, world, rank)) for rank in range(world)]
    if world <= 4:
        return " + ".join(map(str, counts))
    return " + ".join(f"{counts.count(size)} x {size}" for size in sorted(set(counts), reverse=True))


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's place in the division, and how it is applied to one batch."""

    rank: int
    world: int
    reverse: bool = False
    """Reverse the rows inside each global batch before dividing: same mean, other rounding."""

    @property
    def whole(self) -> bool:
        """Whether a batch passes unchanged."""
        return self.world == 1 and not self.reverse

    def span(self, total: int) -> range:
        """This rank's rows; row 0 stands in (and counts for nothing) where it has none."""
        return rows(total, self.world, self.rank) or range(min(1, total))

    def take(self, items: Sequence[Any]) -> tuple[int, int, Sequence[Any]]:
        """Divide the indices or samples of one global batch.

        Returns:
            Real rows of this rank, rows of the global batch, and this rank's items (item 0 when it has none).
        """
        if not isinstance(items, Sized):
            items = list(items)
        total = len(items)
        if self.whole or total == 0:
            return total, total, items
        ordered = list(items)[:: -1 if self.reverse else 1]
        span = self.span(total)
        return len(rows(total, self.world, self.rank)), total, ordered[span.start : span.stop]
