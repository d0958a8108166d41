"""How many batches a step takes, where a loop accumulates by hand: a resume that moves its windows is refused.

`for i, batch in enumerate(loader)` counts from 0 again where a run goes on in the middle of an epoch, and
`(i + 1) % 4 == 0` then steps after other batches than before. `enumerate(loader, resumed.batch)` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.data.cursor import Cursor


class Pace:
    """The batches between steps, in the epochs of the loader that feeds the loop."""

    def __init__(self) -> None:
        self.length = 0
        """Batches of a window: as many in all that began and ended in one epoch; 0 where that is not so, or not known.

        Twice as many are none: a step that finds infinite gradients may be left out.
        """
        self.windows = 0
        """How many there were; -1 where they were unequal."""
        self.steps_at_end: bool | None = None
        """Whether an epoch's last batches make a step though they are too few; None where that was not seen."""
        self.told = False
        """Whether the loop has asked how many batches are done: it counts on from them."""
        self._at = (-1, 0)
        """Epoch and batch in it, at the last step."""
        self._resumed: tuple[int, int] | None = None
        """Where a run went on inside an epoch, between windows of several batches: the epoch, the batch in it."""
        self._stepped = True
        """Whether it has taken a step since."""
        self._left_over = 0
        """Batches at the end of that epoch that made no step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"length": self.length, "windows": self.windows, "steps at end": self.steps_at_end}

    @property
    def counts(self) -> str:
        """What to say of a loop that goes on inside an epoch, and accumulates."""
        return "" if self._resumed is None else "; enumerate(loader, resumed.batch) counts on from there"

    def goes_on(self, saved: Mapping[str, Any], cursor: Cursor, *, inside: bool) -> None:
        """A run goes on where `cursor` stands, `inside` an epoch, perhaps."""
        self.__init__()  # type: ignore[misc]
        self.length, self.windows = int(saved.get("length", 0)), int(saved.get("windows", 0))
        self.steps_at_end = saved.get("steps at end")
        self._at = (cursor.epoch, cursor.batch)
        self._resumed = self._at if inside and self.length > 1 else None
        self._stepped = self._resumed is None

    def check(self, cursor: Cursor, total: int | None) -> None:
        """Before a step: refuse the first one after a resume where it comes after another number of batches."""
        if self._resumed is None or self._stepped or self.told:
            return
        epoch, batch = self._resumed
        self._stepped = True
        now = cursor.batch - batch
        if cursor.epoch == epoch and now % self.length and cursor.batch != total:
            raise UsageError(_moved(self.length, f"the first step comes after {now}"))

    def stepped(self, cursor: Cursor, total: int | None) -> None:
        """An optimizer has stepped."""
        epoch, batch = self._at
        self._at = (cursor.epoch, cursor.batch)
        now = cursor.batch - batch
        first = epoch < 0 and cursor.epoch == 0
        if self.windows < 0 or not now or not (first or cursor.epoch == epoch):
            return
        if not self.length or (epoch, self.windows, self.length) == (0, 1, 1):  # a run may begin with a short one
            self.length, self.windows = now, 1 + (now == self.length)
        elif now % self.length == 0:
            self.windows += 1
        elif cursor.batch != total:
            self.length, self.windows = 0, -1

    def ended(self, cursor: Cursor) -> None:
        """An epoch was walked to its end.

        Raises:
            UsageError: The run went on inside it, and what is left over makes no step, though it does elsewhere.
        """
        epoch, batch = self._at
        if self.length < 2 or epoch != cursor.epoch or cursor.batch % self.length == 0:
            return
        stepped = batch == cursor.batch
        if self._resumed is not None and self._resumed[0] == epoch and not self.told and not stepped:
            self._left_over = cursor.batch - batch
        else:
            self.steps_at_end = stepped
        if self._left_over and self.steps_at_end:
            left, self._left_over = self._left_over, 0
            raise UsageError(_moved(self.length, f"the last {left} of that epoch made no step, as others do"))


def _moved(usual: int, said: str) -> str:
    return explain(
        f"a loop that takes {usual} batches for a step was resumed in the middle of an epoch, and {said}",
        "the same batches in every step as without the interruption",
        "count on: `for i, batch in enumerate(loader, resumed.batch):` with resumed = dt.resume(...)",
    )
