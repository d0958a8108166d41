"""Rows of a batch by shares: whole numbers that add up, and shares that follow the ranks' speeds.

Every rank computes the same from the same numbers, so nothing travels here; `balance` measures speeds and exchanges
them. A rank without rows computes a repeated one all the same, so each gets a row where there are enough of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import floor, inf

from distributedtorch.core.errors import UsageError, explain

LEAST_GAIN = 0.03
"""Shares stay as they are where a step would become faster by less than this part."""
MOST_CHANGE = 1.5
"""The factor by which a share changes at a time, at most."""
_KEPT = 16
"""Changes of shares that are remembered: batches before them are long divided."""

Shares = tuple[float, ...]
"""By rank, the part of a batch that it takes: above 0, together 1."""


def rows_of(total: int, shares: Sequence[float], caps: Sequence[float] | None = None) -> list[int]:
    """How many rows of a batch each rank takes: in proportion, by largest remainder, ties to the lower rank.

    Args:
        total: Rows of the batch.
        shares: By rank, above 0; only their proportion counts.
        caps: By rank, the most rows that it can take.

    Raises:
        UsageError: The batch has more rows than all ranks together can take.
    """
    most = [inf] * len(shares) if caps is None else list(caps)
    if sum(most) < total:
        said = " + ".join(f"{cap:g}" for cap in most)
        given = f"a batch of {total} rows for ranks that can take {said} (DISTRIBUTEDTORCH_MAX_ROWS)"
        raise UsageError(explain(given, "room for every row", "use a smaller batch, larger limits, or more ranks"))
    parts = _parts(total, shares, most)
    counts = [floor(part) for part in parts]
    by_remainder = sorted(range(len(counts)), key=lambda rank: (-round(parts[rank] - counts[rank], 9), rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _parts(total: int, shares: Sequence[float], most: Sequence[float]) -> list[float]:
    """Rows in proportion to shares, but at most `most`, and at least one where there are enough; not whole yet."""
    least = float(total >= len(shares))
    settled: dict[int, float] = {}
    while len(settled) < len(shares):
        free = [rank for rank in range(len(shares)) if rank not in settled]
        each = (total - sum(settled.values())) / sum(shares[rank] for rank in free)
        parts = {rank: each * shares[rank] for rank in free}
        low = {rank: least for rank in free if parts[rank] < least}
        high = {rank: most[rank] for rank in free if parts[rank] > most[rank]}
        if not low and not high:
            settled |= parts
            break
        missing = sum(least - parts[rank] for rank in low)
        spare = sum(parts[rank] - most[rank] for rank in high)
        settled |= low if missing > spare else high
    return [settled[rank] for rank in range(len(shares))]


def equal(world: int) -> Shares:
    """The same for every rank."""
    return (1 / world,) * world


def adjusted(
    shares: Shares, speeds: Sequence[float], total: int, caps: Sequence[float], most_change: float = MOST_CHANGE
) -> Shares:
    """Shares that follow speeds, by bounded steps; as they are where a step would gain too little.

    Args:
        shares: The present ones.
        speeds: Rows per second, by rank; 0 where none was measured: then nothing changes.
        total: Rows of a batch: whole rows decide what a change would gain.
        caps: By rank, the most rows that it can take.
        most_change: The factor by which a share may change.
    """
    if total == 0 or not all(0 < speed < inf for speed in speeds):
        return shares
    wanted = _together_1([max(speed / sum(speeds), 1 / total) for speed in speeds])
    before, after = (_seconds(rows_of(total, one, caps), speeds) for one in (shares, wanted))
    if after > before * (1 - LEAST_GAIN):
        return shares
    return _together_1(
        [min(max(new, old / most_change), old * most_change) for new, old in zip(wanted, shares, strict=True)]
    )


def _seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """How long a step takes: as long as its slowest rank."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def _together_1(values: Sequence[float]) -> Shares:
    total = sum(values)
    return tuple(value / total for value in values)


class Division:
    """Whose rows are whose in the batches of one loader. New shares hold from a batch on that no rank has divided."""

    def __init__(self, shares: Shares, caps: Sequence[float]) -> None:
        self.caps = tuple(caps)
        self.drawn = 0
        """The number of the next batch to be divided: workers load ahead of what is handed out."""
        self._changes: list[tuple[int, Shares]] = [(0, shares)]

    def counts(self, total: int, number: int) -> list[int]:
        """By rank, its rows of batch `number`."""
        return [high - low for low, high in pairwise(self._bounds(total, number))]

    def rows(self, total: int, number: int, rank: int) -> range:
        """The rows of batch `number` that a rank takes; the batch is divided now."""
        self.drawn = max(self.drawn, number + 1)
        bounds = self._bounds(total, number)
        return range(bounds[rank], bounds[rank + 1])

    def change(self, number: int, shares: Shares) -> None:
        """Let these shares hold from batch `number` on."""
        earlier = [one for one in self._changes if one[0] < number]
        self._changes = [*earlier[-_KEPT:], (number, shares)]

    def _bounds(self, total: int, number: int) -> tuple[int, ...]:
        held = [shares for first, shares in self._changes if first <= number] or [self._changes[0][1]]
        return _bounds(total, held[-1], self.caps)


@lru_cache(maxsize=256)
def _bounds(total: int, shares: Shares, caps: tuple[float, ...]) -> tuple[int, ...]:
    """Where each rank's rows begin, and the end of the last."""
    return tuple(accumulate(rows_of(total, shares, caps), initial=0))
