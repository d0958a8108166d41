"""Parameters divided over the ranks (ZeRO stage 3): each rank keeps its range, and fetches a block when it is used.

Rajbhandari et al. 2020, stage 3; Zhao et al., "PyTorch FSDP", VLDB 2023, for gathering by block ahead of use.

The user's Parameter objects stay. While a unit is not in use they have their shapes and no memory; when it is used they
are views of memory from a pool, filled with what all ranks own of it. Every use is seen (`watched.py`), and memory that
somebody still looks at is never taken away. The order of units is learned, and the next one is fetched ahead.

Each rank holds: its range, Psi/N; the units in use and the next one, while they are used.
Travels: Psi (N-1)/N for each time all parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab, Slot, is_empty
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.part import copy_of, everywhere
from distributedtorch.core.pull import Fetch, Pull
from distributedtorch.core.sync import share
from distributedtorch.sync.memory import Memory, checksum, move_in


class Unit:
    """Parameters that are fetched together: one slab."""

    def __init__(self, memory: Divided, slab: Slab, params: Sequence[nn.Parameter]) -> None:
        self.memory, self.slab = memory, slab
        self.params = [params[slot.index] for slot in slab.slots]
        self.range = slice(*slab.bounds[memory.comm.rank : memory.comm.rank + 2])
        self.own = memory.comm.pool.zeros(self.range.stop - self.range.start, slab.dtype, slab.device)
        self.flat: Tensor | None = None
        """All of it, while it is here."""
        self.fetch: Fetch | None = None
        self.inside = 0
        """How many calls under way use it."""
        self.lent: int | None = None
        """Where the user has been given a view of it: what its bytes added up to then."""
        self.stale = False
        """Whether it is to be fetched again before it is computed with: this rank has what it has written itself."""
        self.mates: tuple[Unit, ...] = (self,)
        """The units of its block: they come and go together."""
        self.absent = _nowhere(slab)
        blank = all(is_empty(param) for param in self.params)
        if not blank:
            flat = move_in(slab, params, slab.empty())
            self.own.copy_(flat[self.range])
        self._show(self.absent)
        self.number = memory.pull.offer(self._offered(), blank=blank)  # others may ask from now on

    def _offered(self) -> Tensor:
        """What others can have of this rank's range."""
        return self.own

    def _show(self, views: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, view in zip(self.params, views, strict=True):
                param.data = view

    def lookers(self) -> int:
        """How many tensors look at its memory, beyond the parameters themselves."""
        assert self.flat is not None
        return _looks(self.flat) - _ALONE - len(self.params)

    @property
    def edition(self) -> int:
        return self.memory.pull.editions[self.number]

    def begin(self) -> None:
        """Begin to gather it."""
        self.stale = False
        if self.flat is None:
            slab = self.slab
            self.flat = self.memory.comm.pool.borrow(slab.numel, slab.dtype, slab.device)
            self._show([slot.view(self.flat) for slot in slab.slots])
            AT[self.flat.untyped_storage()._cdata] = self
        if self.memory.pull.is_blank(self.number):
            self.flat.zero_()
            return
        self._fetch(self.flat)

    def _fetch(self, flat: Tensor) -> None:
        flat[self.range].copy_(self.own)
        self.fetch = self.memory.pull.fetch(self.number, flat, everywhere(self.memory.comm, self.slab.bounds))

    def _land(self, flat: Tensor) -> None:
        """What was fetched has come: nothing is left to do where it came to its place."""

    def arrive(self) -> Tensor:
        """Wait until it is all there."""
        if self.flat is None:
            self.begin()
        assert self.flat is not None
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None
            self._land(self.flat)
        return self.flat

    def hold(self) -> None:
        """A call begins to use it."""
        if not self.inside:
            self.settle()
        self.inside += 1

    def lend(self) -> None:
        """A view of it is in the user's hands: writing to that must count."""
        if self.lent is None:
            self.lent = checksum(self.arrive())
            self.memory.lent.append(self)

    def settle(self) -> None:
        """Take over what was written through views."""
        if self.lent is not None:
            now = checksum(self.arrive())
            if now != self.lent:
                self.written()
            self.lent = now
            if not self.lookers():
                self.lent = None
                self.memory.lent.remove(self)

    def written(self, edited: Sequence[nn.Parameter] = (), *, filled: bool = False) -> None:
        """All ranks have written the same to it, to every element of `edited` if `filled`: keep this rank's range."""
        self.own = self.memory.pull.replace(self.number, self.arrive()[self.range])

    def updated(self) -> None:
        """This rank's range has new values, after a fence: others can have them."""
        self.memory.pull.changed(self.number)

    def exact(self) -> Tensor:
        """All of it as its owners have it, in memory of its own. A group call."""
        return self.arrive().clone()

    def bytes_kept(self) -> int:
        """Bytes that it takes while it is not in use."""
        return self.own.numel() * self.own.element_size()

    def drop(self) -> None:
        """Give its memory back, unless somebody looks at it."""
        flat = self.arrive()
        self.settle()
        if not self.lookers():
            self._show(self.absent)
            del AT[flat.untyped_storage()._cdata]
            self.memory.comm.pool.give_back([flat])
            self.flat = None


class Divided(Memory):
    """Every rank keeps its own range of the parameters."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        slabs: Sequence[Slab],
        groups: Iterable[Sequence[int]],
        pull: Pull,
        *,
        comm: Comm,
        make: Callable[[Divided, Slab, Sequence[nn.Parameter]], Unit] = Unit,
    ) -> None:
        self.comm, self.pull, self.params, self.slabs = comm, pull, params, slabs
        self.names = {id(param): said for param, said in zip(params, names, strict=True)}
        self.units: list[Unit] = []
        self.trail = _START
        """The last two blocks used, each with the way it was."""
        self.after: dict[tuple[Any, Any], Unit] = {}
        """What was used after a trail: to be fetched ahead the next time."""
        self.lent: list[Unit] = []
        self._wholes: dict[int, nn.Parameter] = {}
        self.comm.before_waiting.append(self.settle)
        ALL.append(self)
        for slab in slabs:
            self.units.append(make(self, slab, params))
        for group in groups:
            mates = tuple(self.units[number] for number in group)
            for unit in mates:
                unit.mates = mates

    def rest(self) -> None:
        """Let go of everything that can be."""
        self.trail = _START
        self._sweep(keep=())

    def take(self, unit: Unit, way: str, *, fresh: bool = True) -> None:
        """Have a unit here for use, with its block; let others go, and fetch ahead the block that comes after.

        `fresh`: as all ranks have it, not as this one has written it.
        """
        self.settle()
        now = (unit.mates[0].number, way)
        if now != self.trail[-1]:
            self.after[self.trail] = unit
            self.trail = (self.trail[-1], now)
            ahead = self.after.get(self.trail)
            wanted = (*unit.mates, *(ahead.mates if ahead else ()))
            self._sweep(keep=wanted)
            for other in wanted:
                if other.flat is None:
                    other.begin()
        if unit.stale and fresh:
            unit.begin()
        unit.arrive()

    def _sweep(self, keep: Sequence[Unit]) -> None:
        for unit in self.units:
            if unit.flat is not None and not unit.inside and unit not in keep:
                unit.drop()

    def settle(self) -> None:
        """Before anything is asked of other ranks, or waited for: others may need what was written through views."""
        for unit in [unit for unit in self.lent if not unit.inside]:
            unit.settle()

    def used(self, unit: Unit, wrote: Sequence[nn.Parameter] = (), *, filled: bool = False) -> None:
        """After a use outside the blocks: notice what was written, and whether a view was handed out."""
        if wrote:
            unit.written(wrote, filled=filled)
            if unit.lent is not None:
                unit.lent = checksum(unit.arrive())
        if unit.lookers():
            unit.lend()

    # What zero asks of a memory.

    def fence(self) -> None:
        fence()

    def own(self, slab: int) -> Tensor:
        return self.units[slab].own

    def whole(self, param: nn.Parameter, slot: Slot, piece: Tensor) -> Tensor:
        """The same object in every step, with what the user's has: optimizers may know it by identity."""
        view = piece.as_strided(slot.shape, slot.stride)
        known = self._wholes.setdefault(id(param), nn.Parameter(view))
        known.data = view
        known.__dict__.update({name: value for name, value in vars(param).items() if not name.startswith("_")})
        return known

    def agree(self) -> None:
        for unit in self.units:
            unit.updated()
            if unit.flat is not None:
                unit.begin()
                flat = unit.arrive()
                if unit.lent is not None:
                    unit.lent = checksum(flat)
        torch.autograd.graph.increment_version(self.params)

    def bytes_held(self) -> int:
        self.rest()
        kept = sum(unit.bytes_kept() for unit in self.units)
        return kept + sum(u.flat.numel() * u.flat.element_size() for u in self.units if u.flat is not None)

    def release(self) -> None:
        """Every rank has everything again, for good. A group call."""
        for unit in self.units:
            own = unit.exact()
            unit._show([slot.view(own) for slot in unit.slab.slots])
        self.comm.barrier("release")
        self.comm.before_waiting.remove(self.settle)
        ALL.remove(self)
        for unit in self.units:
            assert unit.flat is not None
            del AT[unit.flat.untyped_storage()._cdata]
            self.pull.withdraw(unit.number)

    def assign(self, param: nn.Parameter, unit: Unit, value: Tensor) -> None:
        """`p.data = value`: take over the values."""
        if value.shape != param.shape or value.dtype != unit.own.dtype or value.device != unit.own.device:
            raise UsageError(_converted(self.names[id(param)], value))
        with torch.no_grad():
            param.copy_(value)


_START: tuple[tuple[int, str], tuple[int, str]] = ((-1, ""), (-1, ""))
ALL: list[Divided] = []
"""What is divided in this process."""
AT: dict[int, Unit] = {}
"""Units that are here, by their storage."""


def fence() -> None:
    """Return when no rank needs the present values of anything divided. A group call."""
    for memory in ALL:
        memory.rest()
    everywhere = ALL[0].pull.fence("fence")
    for rank, editions in enumerate(everywhere):
        if editions != everywhere[0]:
            number = next(n for n, (one, two) in enumerate(zip(everywhere[0], editions, strict=True)) if one != two)
            raise DesyncError(_uneven(_name_of(number), rank, everywhere[0][number], editions[number]))


def kept(*, once: bool = False) -> dict[int, tuple[Slot, int, int, Tensor]]:
    """What this rank keeps of every divided parameter, by its id: elements from and to in memory order, and values.

    `once`: of what other replicas keep too, a share, so that all ranks together have everything once.
    """
    found = {}
    for unit in [unit for memory in ALL for unit in memory.units]:
        for slot, param in zip(unit.slab.slots, unit.params, strict=True):
            low, high = unit.slab.piece(slot, unit.memory.comm.rank)
            low, high = share(low, high, copy_of(unit.memory.comm)) if once else (low, high)
            first = slot.start - unit.range.start
            found[id(param)] = slot, low, high, unit.own[first + low : first + high]
    return found


def refilled() -> None:
    """After a fence and new values in what `kept` gives: every rank can have them. A group call."""
    for memory in ALL:
        memory.agree()


def _nowhere(slab: Slab) -> list[Tensor]:
    """Tensors with the parameters' shapes and no memory."""
    views = []
    for slot in slab.slots:
        view = torch.empty_strided(slot.shape, slot.stride, dtype=slab.dtype, device=slab.device)
        view.untyped_storage().resize_(0)
        views.append(view)
    return views


def _looks(flat: Tensor) -> int:
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))  # type: ignore[attr-defined]


_ALONE = _looks(torch.empty(1))
"""What is counted where one tensor looks. Never counted on the spot: memory from the pool may have late lookers."""


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
