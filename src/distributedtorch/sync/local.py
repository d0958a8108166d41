"""Local SGD: replicas step alone and average their parameters every so many steps.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large Mini-Batches, Use
Local SGD", ICLR 2020 (`after`: every step at first, then every so many).

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi; with a lossy wire also what all last agreed on.
Travels per round and rank: 2 Psi (N-1)/N, so that much divided by `every` per step.
`seconds=T`: rounds come about every T seconds; `drift=d`: the period is doubled or halved so that replicas are between
d/2 and d apart in a round, relative to the size of the parameters; `every` is then the first period.
Use it when the link is too slow for ddp. The result depends on the number of ranks; for plain SGD `every=1` is ddp.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.loose import Loose, Meet
from distributedtorch.wire.plain import Plain

_LONGEST = 1 << 20


class Local(Loose):
    """Replicas that average their parameters in rounds."""

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        every: int,
        after: int = 0,
        seconds: float | None = None,
        drift: float | None = None,
    ) -> None:
        super().__init__(trained, comm, wire, 1 if after else every)
        self.meet, self.every, self.after, self.seconds, self.most_drift = meet, every, after, seconds, drift
        self.steps = 0
        """Steps in all."""
        self.began = time.monotonic()
        self.anchor = [param.detach().clone() for param in self.params] if wire.lossy else []
        """What replicas last agreed on, where only changes of it travel."""

    def agree(self) -> None:
        self.steps += self.taken
        numbers = self.meet(self.name, [(time.monotonic() - self.began) / max(self.taken, 1), float(self.refilled)])
        if any(row[1] for row in numbers):
            return self._begin_anew()
        apart, size = self._move() if self.anchor else self.average(self.wire)
        rows = self.meet(f"{self.name}/drift", [apart, size])
        self.drift = (sum(row[0] for row in rows) / len(rows) / max(rows[0][1], 1e-300)) ** 0.5
        self._set_period(max(row[0] for row in numbers))
        self.began = time.monotonic()
        return None

    @torch.no_grad()
    def _move(self) -> tuple[float, float]:
        """As `average`, by changes since the last round."""
        apart, size, world = 0.0, 0.0, self.comm.world
        for slab, flat in self.sums(self.wire, lambda k: (self.params[k].detach() - self.anchor[k]) / world):
            for slot in slab.slots:
                param, anchor = self.params[slot.index].detach(), self.anchor[slot.index]
                anchor.add_(slot.view(flat))
                apart += float((param - anchor).double().square().sum())
                size += float(anchor.double().square().sum())
                param.copy_(anchor)
        self.average_buffers()
        return apart, size

    def _set_period(self, seconds_per_step: float) -> None:
        """The same on all ranks: all have the same numbers."""
        if self.steps < self.after:
            return
        if self.steps - self.taken < self.after:
            self.period = self.every
        elif self.seconds is not None:
            self.period = min(max(1, round(self.seconds / max(seconds_per_step, 1e-9))), _LONGEST)
        elif self.most_drift is not None and self.drift is not None:
            if self.drift > self.most_drift:
                self.period = max(1, self.period // 2)
            elif self.drift < self.most_drift / 2:
                self.period = min(self.period * 2, _LONGEST)

    def _begin_anew(self) -> None:
        """Values were put into the parameters of some rank: they are no movement."""
        self.average(Plain(self.comm))
        self.wire.take_state({})
        self.refilled = False
        for param, anchor in zip(self.params, self.anchor, strict=False):
            anchor.copy_(param.detach())

    def own_state(self) -> dict[str, Tensor]:
        anchors = {f"anchor/{index}": anchor for index, anchor in enumerate(self.anchor)}
        return {**super().own_state(), "steps": torch.tensor(self.steps), **anchors}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        self.steps = int(state["steps"])
        for index, anchor in enumerate(self.anchor):
            anchor.copy_(state[f"anchor/{index}"])

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        return {**held, "parameters": held["parameters"] + sum(map(bytes_of, self.anchor))}
