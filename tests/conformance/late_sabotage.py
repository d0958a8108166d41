"""Ways in which late gradients can be wrong, for `late_pool`: each must be seen. And one that they must stand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distributedtorch.core.pairs import Posted
from distributedtorch.core.wire import TURN
from distributedtorch.sync.collect import Collect
from distributedtorch.sync.late import Late
from distributedtorch.wire import feedback
from distributedtorch.wire.feedback import Coded, Sum
from tests.conformance import wires_pool


class Waited(threading.Event):
    """Tells when a thread beside the training thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
        return super().wait(timeout)


def overtaking(*, sees: bool) -> None:
    """Hold sums of the first turn back until those begun after them are done, or wait for them where they see them."""
    begin, sum_up = Sum.__init__, Sum._sum_up

    def begin_told(self: Any, wire: Coded, name: str, *rest: Any, **options: Any) -> None:
        self.number, self.ahead = wire.counts[feedback.both(name)] + 1, wire.latest.get(feedback.both(name))
        if not sees:
            wire.latest.clear()
        begin(self, wire, name, *rest, **options)
        wire.latest[self.kept] = self.posted

    def sum_up_last(self: Any) -> None:
        if TURN not in self.name and self.number < wires_pool.STEPS:
            self.posted.done.asked.wait()
        sum_up(self)
        if self.ahead is not None:
            self.ahead.done.asked.set()

    class Told(Posted):
        def __init__(self) -> None:
            super().__init__()
            self.done = Waited()

    feedback.Posted = Told  # type: ignore[misc]
    Sum.__init__, Sum._sum_up = begin_told, sum_up_last  # type: ignore[method-assign]


def finished(then: Callable[[Late], None]) -> None:
    """Let something happen after each end of a backward."""
    finish = Late.finish

    def finish_then(self: Late, used: Sequence[bool]) -> None:
        finish(self, used)
        then(self)

    Late.finish = finish_then  # type: ignore[method-assign]


def apply_at_once(late: Late) -> None:
    if late.flying is not None:
        late.away.finish(late.flying)
        late.turn = 1 - late.turn


def land_too_late() -> None:
    """Gradients are shown, and the optimizer steps, before they have come."""
    finish, land = Late.finish, Collect.land

    def finish_first(self: Late, used: Sequence[bool]) -> None:
        Collect.land = lambda self: None  # type: ignore[method-assign]
        finish(self, used)
        Collect.land = land  # type: ignore[method-assign]

    def stepped(self: Late) -> None:
        self.waits = False
        land(self.now.collect)

    Late.finish, Late.stepped = finish_first, stepped  # type: ignore[method-assign]


def lose_at_resume() -> None:
    take = Late.take_own_state

    def take_less(self: Late, state: Mapping[str, Tensor]) -> None:
        take(self, {name: value for name, value in state.items() if name != "flying"})

    Late.take_own_state = take_less  # type: ignore[method-assign]


def add_twice() -> None:
    reduced = Coded.reduced

    def twice(self: Coded, which: str, *rest: object) -> Tensor:
        before = self.left.get(which)
        code = reduced(self, which, *rest)  # type: ignore[arg-type]
        self.left[which] = self.left[which] if before is None else self.left[which] + before
        return code

    Coded.reduced = twice  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "landed at once": lambda: finished(lambda late: late.away.collect.land()),
    "few at once": lambda: setattr(Collect, "_is_due", lambda self, first: len(self.travelling) >= 2),
    "applied at once": lambda: finished(apply_at_once),
    "landed too late": land_too_late,
    "lost at resume": lose_at_resume,
    "not dropped at load": lambda: setattr(Late, "loaded", lambda self: None),
    "kept apart": lambda: setattr(feedback, "both", lambda name: name),
    "added twice": add_twice,
    "overtaken": lambda: overtaking(sees=False),
}
