"""Where parameters lie under zero: in flat memory of which each rank updates one range.

`Replicated` (stages 1 and 2): every rank has all of it, and gathers the others' ranges after every update.
`divided.Divided` (stage 3): every rank keeps its own range only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab, Slot, is_empty
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain


class Memory(ABC):
    """The memory of one optimizer's parameters."""

    comm: Comm
    slabs: Sequence[Slab]

    @abstractmethod
    def fence(self) -> None:
        """Return when no rank needs the present values any more: they are about to change."""

    @abstractmethod
    def own(self, slab: int) -> Tensor:
        """What this rank updates of a slab."""

    @abstractmethod
    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        """A parameter this rank owns all of, for optimizers that need it in its shape."""

    @abstractmethod
    def agree(self) -> None:
        """After the update: every rank has, or can have, the new values."""

    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of parameters on this rank between steps."""


class Replicated(Memory):
    """Every rank has all parameters."""

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], slabs: Sequence[Slab], comm: Comm, name: str
    ) -> None:
        self.params, self.names, self.slabs, self.comm, self.name = params, names, slabs, comm, name
        self.flats = [move_in(slab, params, comm.pool.zeros(slab.numel, slab.dtype, slab.device)) for slab in slabs]

    def fence(self) -> None:
        for slab, flat in zip(self.slabs, self.flats, strict=True):
            for slot in slab.slots:
                if self.params[slot.index].data_ptr() != flat[slot.start :].data_ptr() and slot.numel:
                    raise UsageError(_moved(self.names[slot.index]))

    def own(self, slab: int) -> Tensor:
        bounds = self.slabs[slab].bounds
        return self.flats[slab][bounds[self.comm.rank] : bounds[self.comm.rank + 1]]

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        return param

    def agree(self) -> None:
        waits = []
        for k, slab in enumerate(self.slabs):
            for b, bucket in enumerate(slab.buckets):
                name = f"parameters/{self.name}/{k}.{b}"
                waits.append(self.comm.all_gather(name, self.flats[k], bucket.bounds))
        for pending in waits:
            pending.advance()
        for pending in waits:
            pending.wait()
        torch.autograd.graph.increment_version(self.params)

    def bytes_held(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)


def move_in(slab: Slab, params: Sequence[nn.Parameter], flat: Tensor) -> Tensor:
    """Move parameters into one flat memory; they stay the same objects with the same shapes and strides."""
    for slot in slab.slots:
        param = params[slot.index]
        view = slot.view(flat)
        if not is_empty(param):
            view.copy_(param.detach())
        param.data = view
    return flat


def _moved(name: str) -> str:
    return explain(
        f"parameter {name!r} was given other memory after dt.distribute (model.to, p.data = ...)",
        "parameters that stay where distribute put them",
        "move or convert the model before dt.distribute; change values in place (p.data.copy_)",
    )
