"""Local SGD: replicas step alone and average their parameters every so many steps.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi; with a lossy wire,
`delay` or `rows=used` also what all last agreed on.
Travels per round and rank: 2 Psi (N-1)/N, so that much divided by `every` per step.
`seconds=T`: rounds come about every T seconds; `drift=d`: the period is doubled or halved so that replicas are between
d/2 and d apart in a round, relative to the size of the parameters; `every` is then the first period.
`delay=s`, a word of its own in the plan: a round travels beside the next s steps (`sync/underway.py`).
`rows=used`: rows of embeddings count by how often replicas use them (`sync/used.py`).
Use it when the link is too slow for ddp. The result depends on the number of ranks; for plain SGD `every=1` is ddp.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.loose import Meet
from distributedtorch.sync.rounds import LONGEST, Rounds
from distributedtorch.sync.underway import UNDER_WAY
from distributedtorch.sync.used import USED, UsedRows


class Local(Rounds):
    """Replicas that average their parameters in rounds."""

    comes_and_goes = ("wire/", "anchor/", UNDER_WAY, USED)

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        every: int,
        seconds: float | None = None,
        drift: float | None = None,
        delay: int = 0,
        used: UsedRows | None = None,
    ) -> None:
        options: dict[str, Any] = {"period": every, "drift": drift, "delay": delay, "used": used}
        super().__init__(trained, comm, wire, meet, anchored=wire.lossy, **options)
        self.seconds = seconds
        self.steps = 0
        """Steps in all."""
        self.began = time.monotonic()

    def agree(self) -> None:
        self.steps += self.taken
        super().agree()
        self.began = time.monotonic()

    def pace(self) -> float:
        return (time.monotonic() - self.began) / max(self.taken, 1)

    def follow(self, moved: Tensor, *outer: Tensor) -> None:
        outer[0].add_(moved)

    def set_period(self, seconds_per_step: float) -> None:
        if self.seconds is not None:
            self.period = min(max(1, round(self.seconds / max(seconds_per_step, 1e-9))), LONGEST)
        else:
            super().set_period(seconds_per_step)

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), "steps": torch.tensor(self.steps)}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        self.steps = int(state["steps"])

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        return {**held, "parameters": held["parameters"] + sum(map(bytes_of, self.anchor))}
