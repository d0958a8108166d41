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
        self.lengths: list[int] = []
        """Of the last two windows that began and ended in one epoch."""
        self.steps_at_end: bool | None = None
        """Whether an epoch's last batches make a step though they are too few; None where that was not seen."""
        self.told = False
        """Whether the loop has asked how many batches are done: it counts on from them."""
        self._at = (-1, 0)
        """Epoch and batch in it, at the last step."""
        self._resumed: tuple[int, int, int] | None = None
        """Where a run went on inside an epoch: the epoch, the batch in it, and the batches that a step took before."""
        self._stepped = True
        """Whether it has taken a step since."""
        self._left_over = 0
        """Batches at the end of that epoch that made no step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"lengths": self.lengths, "steps at end": self.steps_at_end}

    def goes_on(self, saved: Mapping[str, Any], cursor: Cursor, *, inside: bool) -> None:
        """A run goes on where `cursor` stands, `inside` an epoch, perhaps."""
        self.__init__()  # type: ignore[misc]
        self.lengths, self.steps_at_end = list(saved.get("lengths", [])), saved.get("steps at end")
        self._at = (cursor.epoch, cursor.batch)
        usual = self.lengths[-1] if len(set(self.lengths)) == 1 else 0
        self._resumed = (cursor.epoch, cursor.batch, usual) if inside and usual > 1 else None
        self._stepped = self._resumed is None

    def check(self, cursor: Cursor, total: int | None) -> None:
        """Before a step: refuse the first one after a resume where it comes after another number of batches.

        A multiple is none: a step that finds infinite gradients may be left out.
        """
        if self._resumed is None or self._stepped or self.told:
            return
        epoch, batch, usual = self._resumed
        self._stepped = True
        now = cursor.batch - batch
        if cursor.epoch == epoch and now % usual and cursor.batch != total:
            raise UsageError(_moved(usual, f"the first step comes after {now}"))

    def stepped(self, cursor: Cursor) -> None:
        """An optimizer has stepped."""
        epoch, batch = self._at
        if cursor.epoch == epoch and cursor.batch > batch:
            self.lengths = [*self.lengths[-1:], cursor.batch - batch]
        elif cursor.epoch == epoch + 1 == 0:  # the run's first
            self.lengths = [cursor.batch]
        self._at = (cursor.epoch, cursor.batch)

    def ended(self, cursor: Cursor) -> None:
        """An epoch was walked to its end.

        Raises:
            UsageError: The run went on inside it, and what is left over makes no step, though it does elsewhere.
        """
        usual = self.lengths[0] if self.lengths else 0
        epoch, batch = self._at
        if usual < 2 or epoch != cursor.epoch or cursor.batch % usual == 0:
            return
        stepped = batch == cursor.batch
        if self._resumed is not None and self._resumed[0] == epoch and not self.told and not stepped:
            self._left_over = cursor.batch - batch
        else:
            self.steps_at_end = stepped
        if self._left_over and self.steps_at_end:
            raise UsageError(_moved(usual, f"the last {self._left_over} of that epoch made no step, as others do"))


def _moved(usual: int, said: str) -> str:
    return explain(
        f"a loop that takes {usual} batches for a step was resumed in the middle of an epoch, and {said}",
        "the same batches in every step as without the interruption",
        "count on: `for i, batch in enumerate(loader, resumed.batch):` with resumed = dt.resume(...)",
    )
