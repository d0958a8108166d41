"""DiLoCo: replicas step alone; what they moved on average is a gradient for an outer optimizer, Nesterov momentum.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi, and 2 Psi for the outer optimizer.
Travels per round and rank: 2 Psi (N-1)/N, so that much divided by `every` per step.
Use it when the link is slow and steps are many: rounds may be hundreds of steps apart. lr=0.7 and momentum=0.9, unless
said otherwise, are the paper's. Do not use it for short runs: the first rounds hardly move.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.loose import Loose, Meet
from distributedtorch.wire.plain import Plain


class Diloco(Loose):
    """Replicas whose mean movement an outer optimizer follows."""

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(trained, comm, wire, every)
        self.meet, self.lr, self.momentum = meet, lr, momentum
        self.anchor = [param.detach().clone() for param in self.params]
        """The outer parameters."""
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchor]

    @torch.no_grad()
    def agree(self) -> None:
        if any(row[0] for row in self.meet(self.name, [float(self.refilled)])):
            return self._begin_anew()
        world, apart, size = self.comm.world, 0.0, 0.0
        for slab, flat in self.sums(self.wire, lambda k: (self.params[k].detach() - self.anchor[k]) / world):
            for slot in slab.slots:
                param, moved = self.params[slot.index].detach(), slot.view(flat)
                anchor, velocity = self.anchor[slot.index], self.velocity[slot.index]
                apart += float((param - anchor - moved).double().square().sum())
                size += float((anchor + moved).double().square().sum())
                velocity.mul_(self.momentum).sub_(moved)
                anchor.add_(moved, alpha=self.lr).sub_(velocity, alpha=self.lr * self.momentum)
                param.copy_(anchor)
        self.average_buffers()
        rows = self.meet(f"{self.name}/drift", [apart, size])
        self.drift = (sum(row[0] for row in rows) / len(rows) / max(rows[0][1], 1e-300)) ** 0.5
        return None

    def _begin_anew(self) -> None:
        """Values were put into the parameters of some rank: they are no movement."""
        self.average(Plain(self.comm))
        self.wire.take_state({})
        self.refilled = False
        for param, anchor, velocity in zip(self.params, self.anchor, self.velocity, strict=True):
            anchor.copy_(param.detach())
            velocity.zero_()

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **dict(self._outer())}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        for name, value in self._outer():
            value.copy_(state[name])

    def _outer(self) -> list[tuple[str, Tensor]]:
        anchors = [(f"anchor/{index}", value) for index, value in enumerate(self.anchor)]
        return anchors + [(f"velocity/{index}", value) for index, value in enumerate(self.velocity)]

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        outer = sum(bytes_of(value) for _, value in self._outer())
        return {**held, "optimizer": held["optimizer"] + outer}
