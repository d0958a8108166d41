"""Exchange now, apply later: the gradient of a step travels beside the whole next step and is applied there.

Each rank holds: parameters Psi, gradients 2 Psi, optimizer state K Psi.
Travels per step and rank: 2 Psi (N-1)/N, with the whole next forward and backward to do so.
The gradient of step t is computed from the parameters of step t and changes those of step t+1: the first step changes
nothing, the last gradient is not used. Use it where exchange takes as long as computing and a wire is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Sync, Trained, bytes_of, require_like
from distributedtorch.core.wire import Wire, travelling
from distributedtorch.sync.collect import Cell, Collect

_TWICE = explain(
    "a second backward before the optimizer's step, under delay=1",
    "one backward per step",
    "add the losses up and call backward once, use accumulate=, or leave delay out of the plan",
)


class Late(Sync):
    """Replicas that average their gradients, and apply them one step later."""

    comes_and_goes = ("wire/", "flying")
    optimizer: torch.optim.Optimizer

    def __init__(self, trained: Trained, comm: Comm, wire: Wire) -> None:
        self.params, self.names, self.optimizer, self.comm = trained.params, trained.names, trained.optimizer, comm
        self.wire, self.scale = wire, 1.0
        slabs = travelling(self.params, wire, comm.world)
        self.collects = [
            Collect(self.params, slabs, comm, self._send, name=f"gradients/{trained.name}.{k}", keep=True)
            for k in range(2)
        ]
        """They take turns: one is applied and then filled while what is in the other travels."""
        self.turn = 0
        self.flying: list[bool] | None = None
        """Of which parameters the last step gave a gradient; None before the first."""
        self.shown: list[int] = []
        self.waits = self.second = False
        """Whether a gradient waits for the optimizer's step, and whether this backward would bring another."""

    @property
    def collect(self) -> Collect:
        return self.collects[self.turn]

    def _send(self, cell: Cell, flat: Tensor, bounds: Sequence[int]) -> Pending:
        slots = [self.collect.where[index][1] for index in cell.bucket.slots]
        return self.wire.all_reduce(cell.name, flat, bounds, slots)

    @property
    def filled(self) -> list[bool]:
        return self.collect.filled

    def begin(self, *, exchange: bool, hide: bool) -> None:
        self.second = self.waits and not self.collect.hidden
        late = self.collect.views
        self.shown = [k for k, param in enumerate(self.params) if param.grad is late[k]]
        for index in self.shown:
            self.params[index].grad = None
        self.collect.begin(exchange=exchange, hide=hide)

    def ready(self, index: int, *, again: bool) -> None:
        if self.second:
            raise UsageError(_TWICE)
        self.collect.scale = self.scale
        self.collect.ready(index, again=again)

    def hold(self) -> None:
        self.collect.held = True

    def launch_rest(self) -> None:
        self.collect.scale = self.scale
        self.collect.launch_rest()

    def finish(self, used: Sequence[bool]) -> None:
        now = self.collect
        now.hidden = now.hide
        if now.hide:
            return
        flags = [a or b for a, b in zip(used, now.filled, strict=True)]
        now.filled = [False] * len(self.params)
        self.turn = 1 - self.turn
        self.collect.land()
        for index, param in enumerate(self.params):
            param.grad = self.collect.views[index] if self.flying is not None and self.flying[index] else None
        self.flying, self.waits = flags, True

    def restore(self) -> None:
        for index in self.shown:
            self.params[index].grad = self.collect.views[index]

    def wipe(self, index: int) -> None:
        self.collect.views[index].zero_()

    def assigned(self) -> bool:
        views = {id(view) for collect in self.collects for view in collect.views}
        return any(param.grad is not None and id(param.grad) not in views for param in self.params)

    def update(self, step: Callable[[], Any]) -> Any:
        return step()

    def stepped(self) -> None:
        self.waits = False

    def loaded(self) -> None:
        """What travels is of other parameters."""
        self.collects[1 - self.turn].land()
        self.flying = None
        self.wire.take_state({})

    def own_state(self) -> dict[str, Tensor]:
        """What is on its way, arrived."""
        flying = self.collects[1 - self.turn]
        flying.land()
        flags = {} if self.flying is None else {"flying": torch.tensor(self.flying)}
        flats = {f"flat/{k}": flat for k, flat in enumerate(flying.flats)}
        return {**flags, **flats, **{f"wire/{name}": value for name, value in self.wire.state().items()}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.flying = None
        if "flying" in state:
            flags = torch.empty(len(self.params), dtype=torch.bool)
            self.flying = require_like("flying", state["flying"], flags).tolist()
        for k, flat in enumerate(self.collects[1 - self.turn].flats):
            flat.copy_(state[f"flat/{k}"])
        self.wire.take_state({k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")})

    def bytes_held(self) -> dict[str, int]:
        return {
            "parameters": sum(map(bytes_of, self.params)),
            "gradients": sum(bytes_of(flat) for collect in self.collects for flat in collect.buffers()),
            "optimizer": self.bytes_of_state(),
            "left out": sum(map(bytes_of, self.wire.state().values())),
        }
