"""DiLoCo: replicas step alone; what they moved on average is a gradient for an outer optimizer, Nesterov momentum.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi, and 2 Psi for the outer optimizer.
Travels per round and rank: 2 Psi (N-1)/N, so that much divided by `every` per step.
`drift=d`: the period is doubled or halved so that replicas are between d/2 and d apart in a round, relative to the size
of the parameters; `every` is then the first period.
`delay=s`, a word of its own in the plan: a round travels beside the next s steps (`sync/underway.py`).
`rows=used`: rows of embeddings count by how often replicas use them (`sync/used.py`).
Use it when the link is slow and steps are many: rounds may be hundreds of steps apart. lr=0.7 is the paper's; momentum,
unless said otherwise, is 0.6: with two replicas the paper's 0.9 was worse than plain means (docs/choosing.md). Do not
use it for a dozen rounds: `local` is better there.
The outer optimizer is the same on all ranks: a checkpoint goes on with it in another world too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.loose import Meet
from distributedtorch.sync.rounds import Rounds
from distributedtorch.sync.underway import UNDER_WAY
from distributedtorch.sync.used import USED, UsedRows


class Diloco(Rounds):
    """Replicas whose mean movement an outer optimizer follows; the anchor has the outer parameters."""

    common = ("counts", "anchor/", "velocity/", f"{UNDER_WAY}moved/")
    comes_and_goes = ("wire/", UNDER_WAY, USED)

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.6,
        drift: float | None = None,
        delay: int = 0,
        used: UsedRows | None = None,
    ) -> None:
        options: dict[str, Any] = {"period": every, "drift": drift, "delay": delay, "used": used}
        super().__init__(trained, comm, wire, meet, anchored=True, **options)
        self.lr, self.momentum = lr, momentum
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchor]

    def outer(self, index: int) -> list[Tensor]:
        return [self.anchor[index], self.velocity[index]]

    def follow(self, moved: Tensor, *outer: Tensor) -> None:
        anchor, velocity = outer
        velocity.mul_(self.momentum).sub_(moved)
        anchor.add_(moved, alpha=self.lr).sub_(velocity, alpha=self.lr * self.momentum)

    def begin_anew(self) -> None:
        super().begin_anew()
        for velocity in self.velocity:
            velocity.zero_()

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **{f"velocity/{index}": value for index, value in enumerate(self.velocity)}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        self._take_outer(state)

    def take_common_state(self, state: Mapping[str, Tensor]) -> None:
        self._let_go()
        self.refilled = False
        self.taken, self.rounds, self.period = state["counts"].tolist()
        self.wire.take_state({})
        if self.used is not None:
            self.used.alike.fill_(True)
        self._take_outer(state)
        for index, param in enumerate(self.params):
            if (moved := state.get(f"{UNDER_WAY}moved/{index}")) is not None:
                self._end_in_another_world(index, param.detach(), moved.to(param.device))

    def _end_in_another_world(self, index: int, param: Tensor, moved: Tensor) -> None:
        """A round was under way: parameters, the mean of what replicas had, have its movement but not the outer one."""
        mean = self.anchor[index] + moved
        self.follow(moved, *self.outer(index))
        param.add_(self.anchor[index] - mean)

    def _take_outer(self, state: Mapping[str, Tensor]) -> None:
        for index, (anchor, velocity) in enumerate(zip(self.anchor, self.velocity, strict=True)):
            anchor.copy_(state[f"anchor/{index}"])
            velocity.copy_(state[f"velocity/{index}"])

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        return {**held, "optimizer": held["optimizer"] + sum(map(bytes_of, [*self.anchor, *self.velocity]))}
