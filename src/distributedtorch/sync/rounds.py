"""Rounds in which all replicas meet: what `local` and `diloco` share.

Where replicas keep what they last agreed on (the anchor), only what they moved since then travels. `drift=d`: the
period is doubled or halved so that replicas are between d/2 and d apart in a round, relative to the size of the
parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, require_like
from distributedtorch.core.wire import Wire
from distributedtorch.sync.loose import Loose, Meet, wide
from distributedtorch.wire.plain import Plain

LONGEST = 1 << 20
"""Steps that a period has at most."""


class Rounds(Loose):
    """Replicas that all meet in rounds."""

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        period: int,
        drift: float | None,
        anchored: bool,
    ) -> None:
        super().__init__(trained, comm, wire, period)
        self.meet, self.most_drift = meet, drift
        self.anchor = [wide(param.detach()).clone() for param in self.params] if anchored else []
        """What replicas last agreed on, where only changes of it travel."""

    @abstractmethod
    def follow(self, index: int, moved: Tensor) -> None:
        """Move the anchor of a parameter, which replicas have moved by so much on average."""

    def pace(self) -> float:
        """Seconds that a step takes here, where that matters."""
        return 0.0

    def agree(self) -> None:
        numbers = self.meet(self.name, [self.pace(), float(self.refilled)])
        if any(row[1] for row in numbers):
            return self.begin_anew()
        apart, size = self._move() if self.anchor else self.average(self.wire)
        rows = self.meet(f"{self.name}/drift", [apart, size])
        self.drift = (sum(row[0] for row in rows) / len(rows) / max(rows[0][1], 1e-300)) ** 0.5
        return self.set_period(max(row[0] for row in numbers))

    def _move(self) -> tuple[float, float]:
        """As `average`, by changes since the last round."""

        def give(index: int, out: Tensor) -> None:
            param, anchor = self.params[index].detach(), self.anchor[index]
            torch.sub(wide(param), wide(anchor.to(param.dtype)), out=out).div_(self.comm.world)  # from where they began

        def follow(index: int, moved: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.anchor[index] + moved
            self.follow(index, moved)
            return mean, self.anchor[index]

        return self.meet_in(self.wire, give, follow)

    def set_period(self, seconds_per_step: float) -> None:
        """Steps until the next round: the same on all ranks, which have the same numbers."""
        if self.most_drift is None or self.drift is None:
            return
        if self.drift > self.most_drift:
            self.period = max(1, self.period // 2)
        elif self.drift < self.most_drift / 2:
            self.period = min(self.period * 2, LONGEST)

    def begin_anew(self) -> None:
        """Values were put into the parameters of some rank: they are no movement."""
        self.average(Plain(self.comm))
        self.start_here()

    def start_here(self) -> None:
        """Replicas are the same now: what they move is counted from here, and nothing is left out."""
        self.wire.take_state({})
        self.refilled = False
        for param, anchor in zip(self.params, self.anchor, strict=False):
            anchor.copy_(param.detach())

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **{f"anchor/{index}": value for index, value in enumerate(self.anchor)}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        for index, anchor in enumerate(self.anchor):
            name = f"anchor/{index}"
            if name in state:
                anchor.copy_(require_like(name, state[name], anchor))
            else:  # saved where nothing was left out of sums: the next round is a plain one
                self.refilled = True
