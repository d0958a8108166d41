"""Exchanges in two steps, of which the second needs the result of the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distributedtorch.core.comm import Comm, Pending


class Twice(Pending):
    """An exchange and then another; the second begins when someone, or the next bucket, finds the first done."""

    def __init__(
        self, comm: Comm, name: str, first: Pending, begin: Callable[[], Pending], begun: deque[Twice]
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
        """Begin the second exchange if the first is done; not where only a stream knows, which would be held.

        Result: whether it has begun.
        """
        streamed = self.first.work is None and not self.first.comm.alone
        if self.second is None and not streamed and self.first.arrived():
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


def go_on(made: Twice) -> Twice:
    """Line up an exchange that was begun, and begin second ones whose first is done, in order."""
    made.begun.append(made)
    for one in list(made.begun):
        if not one.starts():
            break
    return made
