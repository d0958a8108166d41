"""Parameters once per host (`share`): each rank updates its range of them in place, and nothing is gathered inside.

Each host holds: parameters Psi, for all its ranks together.
Travels per step: what zero1 and zero2 send, less the gather of parameters between ranks of one host.

The update stands between two fences: no rank looks at the parameters any more, no rank writes to them any more. So a
rank that evaluates while others go on is waited for. Edits of parameters in place are this rank's own until the next
update, which takes from each rank what it owns: as where every rank has all parameters. An optimizer that edits other
parameters than it is given inside its step is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core import once
from distributedtorch.core.bucket import Slab, Slot
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.sync.memory import Memory, check_in_place, fill, look_at

_EDITED_INSIDE = explain(
    "parameters were edited inside optimizer.step() under `share`",
    "edits before or after the step: during it other ranks write to the same memory",
    "call it after optimizer.step(), or leave `share` out of the plan",
)
ALL: list[OncePerHost] = []
"""What is kept once per host."""


class OncePerHost(Memory):
    """Parameters that all ranks of a host look at."""

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], slabs: Sequence[Slab], comm: Comm, name: str
    ) -> None:
        self.params, self.names, self.slabs, self.comm, self.name = params, names, slabs, comm, name
        for slab in slabs:
            reason = once.refusal(comm, slab.device)
            if reason:
                given = f"`share`, but {reason}"
                needed = "parameters in memory that the ranks of a host share"
                raise UsageError(explain(given, needed, "leave `share` out of the plan"))
        self.memory = once.Once(comm, f"once/{name}", [(slab.numel, slab.dtype) for slab in slabs])
        if comm.shared is not None and comm.shared.rank == 0:
            for slab, truth in zip(slabs, self.memory.truth, strict=True):
                fill(slab, params, truth)
        comm.barrier(f"once/{name}/filled")
        self._look()
        ALL.append(self)

    def fence(self) -> None:
        check_in_place(self.params, self.names, self.slabs, self.memory.seen)
        edited, moved = self.memory.edited(), self.memory.moved()
        self.comm.barrier(f"looked at/{self.name}")
        if edited or moved:
            for k in range(len(self.slabs)):
                self.own(k).copy_(self._mine(k, self.memory.seen[k]))
            self.memory.forget()
        if moved:
            self.memory.look()
            self._look()

    def own(self, slab: int) -> Tensor:
        return self._mine(slab, self.memory.truth[slab])

    def _mine(self, slab: int, flat: Tensor) -> Tensor:
        bounds = self.slabs[slab].bounds
        return flat[bounds[self.comm.rank] : bounds[self.comm.rank + 1]]

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        param.data = piece.as_strided(slot.shape, slot.stride)  # the object itself: optimizers may know it by identity
        self._away = True
        return param

    def stepped(self) -> None:
        if self._away:
            self._look()

    def agree(self) -> None:
        if self.memory.edited():
            raise UsageError(_EDITED_INSIDE)
        waits = [
            self.comm.spread(f"parameters/{self.name}/{k}", self.memory.truth[k], slab.bounds)
            for k, slab in enumerate(self.slabs)
        ]
        for pending in waits:
            pending.wait()
        self.comm.barrier(f"updated/{self.name}")
        torch.autograd.graph.increment_version(self.params)

    def _look(self) -> None:
        """Make parameters what users see."""
        self._away = False
        for slab, seen in zip(self.slabs, self.memory.seen, strict=True):
            look_at(slab, self.params, seen)

    def close(self) -> None:
        """Give every rank parameters of its own again. A group call."""
        ALL.remove(self)
        self.memory.close()

    def bytes_held(self) -> int:
        assert self.comm.shared is not None
        together = sum(p.numel() * p.element_size() for p in self.params)
        return together // self.comm.shared.world + self.memory.edited()


def kept() -> dict[int, tuple[Slot, int, int, Tensor]]:
    """What this rank writes of every parameter kept once per host, by its id: elements from and to in memory order."""
    found = {}
    for memory in ALL:
        for k, slab in enumerate(memory.slabs):
            for slot in slab.slots:
                low, high = slab.piece(slot, memory.comm.rank)
                first = slot.start - slab.bounds[memory.comm.rank]
                found[id(memory.params[slot.index])] = slot, low, high, memory.own(k)[first + low : first + high]
    return found


def fence() -> None:
    """Return when no rank looks at anything kept once per host. A group call."""
    for memory in ALL:
        memory.fence()


def refilled() -> None:
    """After a fence and new values in what `kept` gives: every rank sees them. A group call."""
    for memory in ALL:
        memory.agree()
