"""One exchange through shared memory under way: how far this rank is in it, and what it still has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from distributedtorch.core.shared import Shared

BEGUN, SUMMED, READ = 0, 1, 2
"""What a rank says of itself in an exchange: the words of its line."""


@dataclass
class Job:
    """What is exchanged."""

    flat: Tensor
    """What is given, and where the result goes."""
    bounds: Sequence[int]
    """Rank k owns elements bounds[k] to bounds[k + 1]."""
    out: Tensor | None
    """Where this rank's range of the sum goes; None: nothing is summed."""
    gather: bool
    """Whether every rank gets all ranges."""

    def given(self, rank: int) -> tuple[int, int]:
        """Which elements a rank gives: all that are summed, else its own."""
        if self.out is None:
            return self.bounds[rank], self.bounds[rank + 1]
        return self.bounds[0], self.bounds[-1]


class Transfer:
    """A large exchange: summed and copied where the data lie."""

    def __init__(self, shared: Shared, line: int, job: Job) -> None:
        self.shared, self.line, self.job = shared, line, job
        self.low, self.high = job.bounds[shared.rank], job.bounds[shared.rank + 1]
        self.first, end = job.given(shared.rank)
        given = job.flat[self.first : end]
        self.outside = given.numel() > 0 and shared.own.offset_of(job.flat) is None
        self.staged = given
        """This rank's values in its segment, from element `first` on: borrowed, where `flat` lies outside."""
        if self.outside:
            self.staged = shared.pool.borrow(given.numel(), given.dtype, shared=True).copy_(given)
        self.advanced = False
        self.count = shared.say_begun(line, self.staged)

    def advance(self, *, wait: bool) -> bool:
        """Take this rank's range of the sum, or the others' ranges where nothing is summed. Result: whether done."""
        shared, board = self.shared, self.shared.board
        if wait:
            shared.wait_all(self.line, BEGUN, self.count)  # which may do it meanwhile
        if self.advanced:
            return True
        if not all(board.reached(k, self.line, BEGUN, self.count) for k in shared.others):
            return False
        self.advanced = True
        if self.job.out is None:
            self._spread(BEGUN)
        else:
            self._sum(self.job.out)
            board.put(self.line, SUMMED if self.job.gather else READ, self.count)
        return True

    def ends(self) -> bool:
        """Whether `finish` would not wait; not where ranges are still to be copied."""
        read = (self.shared.board.reached(k, self.line, READ, self.count) for k in self.shared.others)
        return self.advance(wait=False) and all(read)

    def _sum(self, out: Tensor) -> None:
        shared, job = self.shared, self.job
        span = self.low - self.first, self.high - self.low
        if span[1]:
            mine = self.staged[span[0] : span[0] + span[1]]
            parts = [
                mine if k == shared.rank else shared.data(k, self.line, self.count, span, mine.dtype)
                for k in range(shared.world)
            ]
            shared.sum_range(parts, mine if job.gather else out)

    def _spread(self, word: int) -> None:
        """Copy the others' ranges as they come."""
        shared, job = self.shared, self.job
        for k in shared.others:
            low, high = job.bounds[k], job.bounds[k + 1]
            shared.board.wait(k, self.line, word, self.count)
            if high > low:
                span = (0 if job.out is None else low - self.first), high - low
                job.flat[low:high].copy_(shared.data(k, self.line, self.count, span, job.flat.dtype))
        shared.board.put(self.line, READ, self.count)

    def finish(self) -> None:
        """Return when the result is in place and nobody reads this rank's memory any more."""
        job = self.job
        self.advance(wait=True)
        if job.out is not None and job.gather:
            if self.outside:
                job.out.copy_(self.staged[self.low - self.first : self.high - self.first])
            self._spread(SUMMED)
        self.shared.wait_all(self.line, READ, self.count)
        self.shared.ended(self)
        if self.outside:
            self.shared.pool.give_back([self.staged])


class Brief:
    """A small exchange under way: every rank puts all it gives into a box, and takes what it needs from the others'.

    More is summed than need be, but it is over when all have begun.
    """

    def __init__(self, shared: Shared, line: int, job: Job) -> None:
        self.shared, self.line, self.job = shared, line, job
        own = job.bounds[shared.rank], job.bounds[shared.rank + 1]
        self.taken = (job.bounds[0], job.bounds[-1]) if job.gather else own
        """What this rank takes: of the sum, where there is one."""
        low, high = job.given(shared.rank)
        self.count = shared.put(line, job.flat[low:high])

    def advance(self, *, wait: bool) -> bool:
        """Nothing is left to do for others."""
        return True

    def ends(self) -> bool:
        """Whether `finish` would not wait."""
        return all(self.shared.board.reached(k, self.line, BEGUN, self.count) for k in self.shared.others)

    def finish(self) -> None:
        """Return when the result is in place."""
        shared, flat, bounds, (low, high) = self.shared, self.job.flat, self.job.bounds, self.taken
        shared.wait_all(self.line, BEGUN, self.count)
        if self.job.out is None:
            for k in shared.others:
                if bounds[k + 1] > bounds[k]:
                    data = shared.data(k, self.line, self.count, (0, bounds[k + 1] - bounds[k]), flat.dtype)
                    flat[bounds[k] : bounds[k + 1]].copy_(data)
        elif high > low:
            mine, span = flat[low:high], (low - bounds[0], high - low)
            parts = [
                mine if k == shared.rank else shared.data(k, self.line, self.count, span, flat.dtype)
                for k in range(shared.world)
            ]
            shared.sum_range(parts, mine if self.job.gather else self.job.out)
