"""Where parameters lie under zero: in flat memory of which each rank updates one range.

`Replicated` (stages 1 and 2): every rank has all of it, and gathers the others' ranges after every update.
`Shown` (stages 1 and 2 with a wire): as that, with changes sent by codes.
`once.OncePerHost` (stages 1 and 2 with `share`): the ranks of a host have it together.
`divided.Divided` (stage 3): every rank keeps its own range only.
"""

from __future__ import annotations

import ctypes
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab, Slot, is_empty
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.wire import is_plain
from distributedtorch.wire.feedback import Coded


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

    def stepped(self) -> None:  # noqa: B027 (most have nothing to do)
        """The optimizer is done with what `own` and `whole` gave, or has failed."""

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
        check_in_place(self.params, self.names, self.slabs, self.flats)

    def own(self, slab: int) -> Tensor:
        bounds = self.slabs[slab].bounds
        return self.flats[slab][bounds[self.comm.rank] : bounds[self.comm.rank + 1]]

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        return param

    def agree(self) -> None:
        gather(self.comm, self.slabs, self.flats, f"parameters/{self.name}")
        torch.autograd.graph.increment_version(self.params)

    def bytes_held(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)


class Shown(Replicated):
    """Every rank has all parameters as they were sent to it, and its own range exactly too.

    Forward and backward see the same values on all ranks; what codes leave out of a change is in the next one.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        slabs: Sequence[Slab],
        wire: Coded,
        name: str,
    ) -> None:
        super().__init__(params, names, slabs, wire.comm, name)
        self.wire = wire
        self.exact = [super(Shown, self).own(k).clone() for k in range(len(slabs))]
        """This rank's range of each slab."""
        self.seen = self._checksums()

    def _shown(self, slab: int) -> Tensor:
        return super().own(slab)

    def _checksums(self) -> list[int]:
        return [checksum(self._shown(k)) for k in range(len(self.slabs))]

    def fence(self) -> None:
        super().fence()
        for k, now in enumerate(self._checksums()):
            if now != self.seen[k]:  # someone has edited parameters
                self.exact[k].copy_(self._shown(k))

    def refill(self) -> None:
        """Take over values that were put into the parameters from outside."""
        for k, exact in enumerate(self.exact):
            exact.copy_(self._shown(k))

    def own(self, slab: int) -> Tensor:
        return self.exact[slab]

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        return piece.as_strided(slot.shape, slot.stride)

    def agree(self) -> None:
        waits, rank = [], self.comm.rank
        for k, slab in enumerate(self.slabs):
            small, flat = is_plain(slab.slots, slab.dtype), self.flats[k]
            if small:
                self._shown(k).copy_(self.exact[k])
            for b, bucket in enumerate(slab.buckets):
                name, low = f"parameters/{self.name}/{k}.{b}", slab.bounds[rank]
                mine = self.exact[k][bucket.bounds[rank] - low : bucket.bounds[rank + 1] - low]
                gathered = self.comm.all_gather(name, flat, bucket.bounds) if small else None
                waits.append(gathered or self.wire.bring_near(name, flat, bucket.bounds, mine))
        for pending in waits:
            pending.advance()
        for pending in waits:
            pending.wait()
        for slab, flat in zip(self.slabs, self.flats, strict=True):
            flat[sum(slot.numel for slot in slab.slots) :].zero_()
        self.seen = self._checksums()
        torch.autograd.graph.increment_version(self.params)

    def settle(self) -> None:
        """Give every rank the exact values. A group call."""
        for k, exact in enumerate(self.exact):
            self._shown(k).copy_(exact)
        gather(self.comm, self.slabs, self.flats, f"exact/{self.name}")
        self.seen = self._checksums()
        torch.autograd.graph.increment_version(self.params)

    def exactly(self) -> dict[int, Tensor]:
        """By the id of a parameter its exact values. A group call."""
        flats = [flat.clone() for flat in self.flats]
        for slab, flat, exact in zip(self.slabs, flats, self.exact, strict=True):
            flat[slab.bounds[self.comm.rank] : slab.bounds[self.comm.rank + 1]] = exact
        gather(self.comm, self.slabs, flats, f"exact/{self.name}")
        pairs = [(slot, flat) for slab, flat in zip(self.slabs, flats, strict=True) for slot in slab.slots]
        return {id(self.params[slot.index]): slot.view(flat) for slot, flat in pairs}

    def own_state(self) -> dict[str, Tensor]:
        shown = {f"shown/{k}": self._shown(k) for k in range(len(self.slabs))}
        return {**shown, **{f"exact/{k}": exact for k, exact in enumerate(self.exact)}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        """A group call."""
        for k, exact in enumerate(self.exact):
            exact.copy_(state[f"exact/{k}"])
            self._shown(k).copy_(state[f"shown/{k}"])
        gather(self.comm, self.slabs, self.flats, f"shown/{self.name}")
        self.seen = self._checksums()

    def bytes_held(self) -> int:
        return super().bytes_held() + sum(exact.numel() * exact.element_size() for exact in self.exact)


def checksum(flat: Tensor) -> int:
    """What the bytes of dense values add up to."""
    host = flat.cpu()
    size = host.numel() * host.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(host.data_ptr()))  # numpy() would fix its storage's size


def move_in(slab: Slab, params: Sequence[nn.Parameter], flat: Tensor) -> Tensor:
    """Move parameters into one flat memory; they stay the same objects with the same shapes and strides."""
    fill(slab, params, flat)
    look_at(slab, params, flat)
    return flat


def fill(slab: Slab, params: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Give a flat memory the parameters' values."""
    for slot in slab.slots:
        if not is_empty(params[slot.index]):
            slot.view(flat).copy_(params[slot.index].detach())


def look_at(slab: Slab, params: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Make parameters views of a flat memory."""
    for slot in slab.slots:
        params[slot.index].data = slot.view(flat)


def gather(comm: Comm, slabs: Sequence[Slab], flats: Sequence[Tensor], name: str) -> None:
    """Bring every rank's ranges to all."""
    waits = [
        comm.all_gather(f"{name}/{k}.{b}", flats[k], bucket.bounds)
        for k, slab in enumerate(slabs)
        for b, bucket in enumerate(slab.buckets)
    ]
    for pending in waits:
        pending.advance()
    for pending in waits:
        pending.wait()


def check_in_place(
    params: Sequence[nn.Parameter], names: Sequence[str], slabs: Sequence[Slab], flats: Sequence[Tensor]
) -> None:
    """Refuse parameters that have been given other memory."""
    for slab, flat in zip(slabs, flats, strict=True):
        for slot in slab.slots:
            if params[slot.index].data_ptr() != flat[slot.start :].data_ptr() and slot.numel:
                raise UsageError(_moved(names[slot.index]))


def _moved(name: str) -> str:
    return explain(
        f"parameter {name!r} was given other memory after dt.distribute (model.to, p.data = ...)",
        "parameters that stay where distribute put them",
        "move or convert the model before dt.distribute; change values in place (p.data.copy_)",
    )
