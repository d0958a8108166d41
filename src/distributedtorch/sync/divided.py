"""Parameters divided over the ranks (ZeRO stage 3): each rank keeps its range, and fetches a block when it is used.

Rajbhandari et al. 2020, stage 3; Zhao et al., "PyTorch FSDP", VLDB 2023, for gathering by block ahead of use.

The user's Parameter objects stay. The flat memory they are views of is given back to the system when it is not in use
(its storage has no bytes then) and filled again when it is, so whatever autograd has saved stays valid. Every use is
seen (`watched.py`), and memory that somebody still looks at is never taken away. The order of blocks is learned, and
the next one is fetched ahead.

Each rank holds: its range, Psi/N; the units in use and the next one, while they are used.
Travels: Psi (N-1)/N for each time all parameters are gathered.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab, Slot
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.pull import Fetch, Pull
from distributedtorch.sync.memory import Memory, move_in


class Unit:
    """Parameters that are fetched together: one slab."""

    def __init__(self, memory: Divided, slab: Slab, params: Sequence[nn.Parameter]) -> None:
        self.memory, self.slab = memory, slab
        self.params = [params[slot.index] for slot in slab.slots]
        low, high = slab.bounds[memory.comm.rank : memory.comm.rank + 2]
        self.range = slice(low, high)
        self.here = True
        self.fetch: Fetch | None = None
        self.inside = 0
        """How many calls under way use it."""
        self.lent: int | None = None
        """Where the user has been given a view of it: what its bytes added up to then."""
        self.looks = 0
        self._live_in(move_in(slab, params))
        self.bytes = self.storage.nbytes()
        self.own = self.flat[self.range].clone()
        self.number = memory.pull.offer(self.own)

    def _live_in(self, flat: Tensor) -> None:
        self.flat, self.storage, self.looks = flat, flat.untyped_storage(), 0
        self.looks = self.lookers()
        AT[self.storage._cdata] = self

    def lookers(self) -> int:
        """How many tensors look at its memory, beyond the parameters themselves."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) - self.looks  # type: ignore[attr-defined]

    @property
    def edition(self) -> int:
        return self.memory.pull.editions[self.number]

    def begin(self) -> None:
        """Begin to gather it."""
        self.storage.resize_(self.bytes)
        self.flat[self.range].copy_(self.own)
        self.fetch = self.memory.pull.fetch(self.number, self.flat, self.slab.bounds)
        self.here = True

    def arrive(self) -> None:
        """Wait until it is all there."""
        if not self.here:
            self.begin()
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None

    def lend(self) -> None:
        """A view of it is in the user's hands: writing to that must count."""
        if self.lent is None:
            self.lent = _sum(self.flat)
            self.memory.lent.append(self)

    def settle(self) -> None:
        """Take over what was written through views."""
        if self.lent is not None:
            now = _sum(self.flat)
            if now != self.lent:
                self.written()
            self.lent = now
            if not self.lookers():
                self.lent = None
                self.memory.lent.remove(self)

    def written(self) -> None:
        """All ranks have written the same to it: keep this rank's range of that."""
        self.own = self.flat[self.range].clone()
        self.memory.pull.replace(self.number, self.own)

    def drop(self) -> None:
        """Give its memory back, unless somebody looks at it."""
        self.arrive()
        self.settle()
        if not self.lookers():
            if not self.storage.resizable():  # numpy has looked at it
                self._move_out()
            self.storage.resize_(0)
            self.here = False

    def _move_out(self) -> None:
        del AT[self.storage._cdata]
        flat = self.slab.empty()
        with torch._C.DisableTorchFunctionSubclass():
            for param, slot in zip(self.params, self.slab.slots, strict=True):
                param.data = slot.view(flat)
        self._live_in(flat)


class Divided(Memory):
    """Every rank keeps its own range of the parameters."""

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], slabs: Sequence[Slab], pull: Pull, name: str
    ) -> None:
        self.comm, self.pull, self.params, self.slabs, self.name = pull.comm, pull, params, slabs, name
        self.names = {id(param): said for param, said in zip(params, names, strict=True)}
        self.units: list[Unit] = []
        self.after: dict[tuple[int, str], Unit] = {}
        """The unit used after a unit, and in what way: what to fetch ahead."""
        self.latest: tuple[int, str] | None = None
        self.lent: list[Unit] = []
        self.comm.before_waiting.append(self.settle)
        ALL.append(self)
        for slab in slabs:
            unit = Unit(self, slab, params)
            unit.drop()
            self.units.append(unit)

    def rest(self) -> None:
        """Let go of everything that can be."""
        self.latest = None
        self._sweep(keep=())

    def take(self, unit: Unit, way: str) -> None:
        """Have a unit here for use, let others go, and fetch ahead the one that comes after."""
        self.settle()
        now = (unit.number, way)
        if now == self.latest:
            return unit.arrive()
        if self.latest is not None and self.latest[0] != unit.number:
            self.after[self.latest] = unit
        self.latest = now
        ahead = self.after.get(now)
        self._sweep(keep=(unit, ahead))
        if not unit.here:
            unit.begin()
        if ahead is not None and not ahead.here:
            ahead.begin()
        unit.arrive()

    def _sweep(self, keep: Iterable[Unit | None]) -> None:
        for unit in self.units:
            if unit.here and not unit.inside and unit not in keep:
                unit.drop()

    def settle(self) -> None:
        """Before anything is asked of other ranks, or waited for: others may need what was written through views."""
        for unit in [unit for unit in self.lent if not unit.inside]:
            unit.settle()

    def used(self, unit: Unit, *, wrote: bool) -> None:
        """After a use outside the blocks: notice what was written, and whether a view was handed out."""
        if wrote:
            unit.written()
            if unit.lent is not None:
                unit.lent = _sum(unit.flat)
        if unit.lookers():
            unit.lend()

    # What zero asks of a memory.

    def fence(self) -> None:
        fence()

    def own(self, slab: int) -> Tensor:
        return self.units[slab].own

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        return piece.as_strided(slot.shape, slot.stride)

    def agree(self) -> None:
        for unit in self.units:
            self.pull.changed(unit.number)
            if unit.here:
                unit.begin()
                unit.arrive()
                if unit.lent is not None:
                    unit.lent = _sum(unit.flat)
        torch.autograd.graph.increment_version(self.params)

    def bytes_held(self) -> int:
        self.rest()
        kept = sum(unit.own.numel() * unit.own.element_size() for unit in self.units)
        return kept + sum(unit.bytes for unit in self.units if unit.here)

    def release(self) -> None:
        """Every rank has everything again, for good. A group call."""
        for unit in self.units:
            unit.inside = 1
            unit.arrive()
        self.comm.barrier(f"release/{self.name}")
        self.comm.before_waiting.remove(self.settle)
        ALL.remove(self)
        for unit in self.units:
            del AT[unit.storage._cdata]
            self.pull.withdraw(unit.number)

    def assign(self, param: nn.Parameter, unit: Unit, value: Tensor) -> None:
        """`p.data = value`: take over the values."""
        if value.shape != param.shape or value.dtype != unit.flat.dtype or value.device != unit.flat.device:
            raise UsageError(_converted(self.names[id(param)], value))
        with torch.no_grad():
            param.copy_(value)


ALL: list[Divided] = []
"""What is divided in this process."""
AT: dict[int, Unit] = {}
"""Units by their storage."""


def fence() -> None:
    """Return when no rank needs the present values of anything divided. A group call."""
    for memory in ALL:
        memory.rest()
    everywhere = ALL[0].pull.fence("fence")
    for rank, editions in enumerate(everywhere):
        if editions != everywhere[0]:
            number = next(n for n, (one, two) in enumerate(zip(everywhere[0], editions, strict=True)) if one != two)
            raise DesyncError(_uneven(_name_of(number), rank, everywhere[0][number], editions[number]))


def _sum(flat: Tensor) -> int:
    host = flat.cpu()
    size = host.numel() * host.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(host.data_ptr()))  # numpy() would fix its storage's size


def _name_of(number: int) -> str:
    return next((m.names[id(u.params[0])] for m in ALL for u in m.units if u.number == number), "?")


def _uneven(name: str, rank: int, times: int, other: int) -> str:
    return explain(
        f"the parameters around {name!r} were changed on some ranks only (rank 0 {times} times, rank {rank} {other})",
        "every rank to make the same changes to parameters (load_state_dict, p.copy_, p.data)",
        "make them on all ranks",
    )


def _converted(name: str, value: Tensor) -> str:
    return explain(
        f"p.data of {name!r} set to {tuple(value.shape)} {value.dtype} on {value.device} after dt.distribute",
        "the shape, dtype and device it has",
        "move or convert the model before dt.distribute",
    )
