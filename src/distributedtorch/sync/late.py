"""Exchange now, apply later: the gradient of a step travels beside the whole next step and is applied there.

Each rank holds: what it holds without it, and a second memory for gradients: Psi more under ddp and zero1, Psi/N under
zero2 and zero3. These two also hold the buckets that travel: a few where links keep up, up to Psi where they do not,
because a backward that waited for them would travel no faster than one without delay.
Travels per step and rank: as much as without it, with the whole next forward and backward to do so.

The gradient of step t is computed from the parameters of step t and changes those of step t+1: the first step changes
nothing, the last gradient is not used. What a wire leaves out of step t is added to step t+1; powersgd, which knows it
only when sums have come, adds it to t+2 and so keeps it twice. Each gradient is used once: one that is not zeroed
after its step is refused. Use it where exchange takes as long as computing and a wire is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Kept, Sync, bytes_of, require_like
from distributedtorch.sync.ddp import Ddp
from distributedtorch.sync.zero import Zero

_TWICE = explain(
    "a second backward before the optimizer's step, under delay=1",
    "one backward per step",
    "add the losses up and call backward once, use accumulate=, or leave delay out of the plan",
)
_NOT_ZEROED = explain(
    "gradients of the last step are still there at the next backward, under delay=1",
    "gradients that are used once: what comes now is not added to them",
    "call optimizer.zero_grad() after each step, or leave delay out of the plan",
)


class Late(Sync):
    """Two syncs of the same parameters that take turns: one is shown and then filled while the other's travels."""

    comes_and_goes = ("wire/", "flying")
    optimizer: torch.optim.Optimizer | None

    def __init__(self, turns: Sequence[Ddp] | Sequence[Zero]) -> None:
        self.turns, first = turns, turns[0]
        self.params, self.names, self.optimizer, self.scale = first.params, first.names, first.optimizer, 1.0
        self.eager, self.divided = first.eager, first.divided
        for one in turns:
            one.collect.unhurried = True
        self.turn = 0
        self.flying: list[bool] | None = None
        """Of which parameters the last step gave a gradient; None where none travels."""
        self.shown: list[int] = []
        self.waits = self.second = self.again = False
        """Whether a gradient waits for the optimizer's step, this backward would bring another, or finds a used one."""

    @property
    def now(self) -> Ddp | Zero:
        """What is shown, or filled."""
        return self.turns[self.turn]

    @property
    def away(self) -> Ddp | Zero:
        """What travels."""
        return self.turns[1 - self.turn]

    @property
    def filled(self) -> list[bool]:
        return self.now.filled

    @property
    def pending(self) -> bool:
        return self.now.pending

    @property
    def backlog(self) -> int:
        return int(self.flying is not None)

    # Around a backward.

    def begin(self, *, exchange: bool, hide: bool) -> None:
        now = self.now
        self.second = self.waits and not now.collect.hidden
        self.shown = [index for index in range(len(self.params)) if now.shows(index)]
        self.again = not self.waits and any(bool(now.kept_of(index).any()) for index in self.shown)
        for index in self.shown:
            self.params[index].grad = None
        now.root, now.windowed = self.root, self.windowed
        now.begin(exchange=exchange, hide=hide)

    def ready(self, index: int, *, again: bool) -> None:
        if self.second:
            raise UsageError(_TWICE)
        if self.again:
            raise UsageError(_NOT_ZEROED)
        self.now.scale = self.scale
        self.now.ready(index, again=again)

    def hold(self) -> None:
        self.now.hold()

    def launch_rest(self) -> None:
        self.now.scale = self.scale
        self.now.launch_rest()

    def finish(self, used: Sequence[bool]) -> None:
        now = self.now
        if now.collect.hide:
            now.finish(used)
            return
        came, self.flying = self.flying, now.given(used)
        now.collect.hidden, now.collect.filled = False, [False] * len(self.params)
        self.turn = 1 - self.turn
        for param in self.params:
            param.grad = None
        if came is not None:
            self.now.finish(came)
        self.waits = True

    def restore(self) -> None:
        for index in self.shown:
            self.now.show(index)

    def wipe(self, index: int) -> None:
        self.now.wipe(index)

    def assigned(self) -> bool:
        pairs = enumerate(self.params)
        return any(param.grad is not None and not any(one.shows(k) for one in self.turns) for k, param in pairs)

    # The update.

    def update(self, step: Callable[[], Any]) -> Any:
        return self.now.update(step)

    def stepped(self) -> None:
        self.waits = False

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        return self.now.whole_state()

    def take_state(self) -> None:
        self.now.take_state()

    def keeps(self, index: int) -> Kept:
        return self.now.keeps(index)

    def consensus(self) -> dict[int, Tensor]:
        return self.now.consensus()

    def settle(self) -> None:
        self.away.arrivals()
        self.now.settle()

    def loaded(self) -> None:
        """What travels is of other parameters."""
        self.away.arrivals()
        self.flying = None
        self.now.loaded()

    def own_state(self) -> dict[str, Tensor]:
        """What is on its way, arrived; a window's factor is still to come."""
        flats = {f"flat/{k}": flat for k, flat in enumerate(self.away.arrivals())}
        factors = torch.tensor([self.turn, self.away.scale, self.away.root], dtype=torch.float64)
        flags = {} if self.flying is None else {"flying": torch.tensor(self.flying)}
        return {**flags, **flats, "turn": factors, **self.now.own_state()}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        for index, param in enumerate(self.params):
            if self.now.shows(index):
                param.grad = None
        turn, scale, root = require_like("turn", state["turn"], torch.empty(3, dtype=torch.float64)).tolist()
        self.turn, self.flying = int(turn == 1), None
        if "flying" in state:
            flags = torch.empty(len(self.params), dtype=torch.bool)
            self.flying = require_like("flying", state["flying"], flags).tolist()
        self.away.scale, self.away.root = scale, root
        for k, flat in enumerate(self.away.arrivals()):
            flat.copy_(state[f"flat/{k}"])
        own = ("flat/", "turn", "flying")
        self.now.take_own_state({name: value for name, value in state.items() if not name.startswith(own)})

    def bytes_held(self) -> dict[str, int]:
        held = self.now.bytes_held()
        held["gradients"] += self.away.bytes_held()["gradients"]
        travelling = [cell.buffer for one in self.turns for cell in one.collect.cells if cell.buffer is not None]
        held["gradients"] += sum(map(bytes_of, travelling))
        return held
