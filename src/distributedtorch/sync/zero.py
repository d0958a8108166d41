"""ZeRO: optimizer state (stage 1), gradients too (2) and parameters too (3) are divided over the ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

Each rank holds: parameters Psi, or Psi/N and the block in use (stage 3); gradients Psi (stage 1) or Psi/N and a few
buckets; optimizer state K Psi/N. Under `replicate=R` the ranks of a replica divide it: N/R in place of N.
Travels per step and rank: Psi (N-1)/N, the reduce-scatter of gradients, and Psi (N-1)/N, the gather of parameters;
stage 3 gathers them twice, for forward and for backward. Stages 2 and 3 send the gradients' part at every backward,
stage 1 once per optimizer step under `accumulate`.

The user's optimizer object makes the update on what this rank owns: pieces of flat memory for elementwise optimizers,
whole parameters for all others. Use stage 1 or 2 when optimizer state is what does not fit, stage 3 when the model
itself does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab, Slot
from distributedtorch.core.comm import Pending
from distributedtorch.core.part import copy_of
from distributedtorch.core.plan import Traits
from distributedtorch.core.sync import Kept, Sync, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.sync.collect import Cell, Collect, refuse_buffer
from distributedtorch.sync.gradient import DividedGrad, Held
from distributedtorch.sync.memory import Memory, Shown
from distributedtorch.sync.state import divide_state, gather_state, step_on

_HELD_HERE = 2  # by the list, and by the question
TRAITS = Traits(lockstep=True, owns="flat", places="rank")


class Zero(Sync):
    """Replicas that divide the optimizer's work and state."""

    optimizer: torch.optim.Optimizer
    divided = True

    def __init__(
        self,
        params: list[nn.Parameter],
        names: list[str],
        optimizer: torch.optim.Optimizer,
        name: str,
        memory: Memory,
        *,
        wire: Wire,
        eager: bool,
        whole: bool,
    ) -> None:
        self.params, self.names, self.optimizer, self.comm, self.name = params, names, optimizer, memory.comm, name
        self.memory, self.slabs, self.wire = memory, memory.slabs, wire
        self.eager, self.whole, self.scale = eager, whole, 1.0
        comm, sent = self.comm, f"gradients/{name}"
        self.collect = Collect(params, self.slabs, comm, self._send, name=sent, keep=not eager, arrived=self._arrived)
        self.shards = [_shard(slab, comm.rank) for slab in self.slabs] if eager else []
        self.held = [self._held(slab, k, slot) for k, slab, slot in self._slots()]
        self.held.sort(key=lambda held: held.slot.index)
        self.content = [False] * len(params)
        """Whether the pieces hold reduced gradients that a further backward adds to."""
        self.kept: dict[int, Tensor] = {}
        self.put_away: list[int] = []
        self.window = 1.0
        """What the shown content has been multiplied by beyond the mean over ranks (stage 2)."""
        divide_state(optimizer, params, self.held, whole=whole)

    def _slots(self) -> Iterator[tuple[int, Slab, Slot]]:
        for k, slab in enumerate(self.slabs):
            for slot in slab.slots:
                yield k, slab, slot

    def _held(self, slab: Slab, k: int, slot: Slot) -> Held:
        rank, world = self.comm.rank, self.comm.world
        low, high = slab.piece(slot, rank)
        if not self.eager:
            local = self.collect.flats[k][slot.start + low : slot.start + high]
        else:
            first = _own(slab, rank)[0]
            local = self.shards[k][slot.start + low - first : slot.start + high - first]
        bounds = [slab.piece(slot, r)[0] for r in range(world)] + [slab.piece(slot, world - 1)[1]]
        return Held(slot, local, bounds, self.comm, self.names[slot.index])

    # Around a backward.

    @property
    def filled(self) -> list[bool]:
        return self.collect.filled

    @property
    def pending(self) -> bool:
        return any(self.content) if self.eager and self.collect.hidden else any(self.filled)

    def begin(self, *, exchange: bool, hide: bool) -> None:
        self.put_away = []
        for index, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, DividedGrad):
                self.held[index].settle()
                param.grad = None
                self.put_away.append(index)
                self.content[index] = True
            elif grad is None and sys.getrefcount(self.held[index]) > _HELD_HERE and not self.collect.hidden:
                self._let_go(index)
                self.content[index] = False
            elif grad is None and not (self.collect.hidden and (self.eager or self.collect.filled[index])):
                self.content[index] = False
                self.kept.pop(index, None)
            elif grad is not None:
                refuse_buffer(grad, self.collect.flats)
                self.held[index].local.copy_(self.held[index].mine(grad))
                self.held[index].square = None
                param.grad = None
                self.put_away.append(index)
                self.content[index] = True
        if not self.collect.hidden and (not self.eager or self.windowed):
            self._keep_aside()
        if any(self.content):
            self._window(1.0)
        else:
            self.window = 1.0
        self.collect.begin(exchange=exchange or self.eager, hide=hide)

    def _let_go(self, index: int) -> None:
        """The user still holds a gradient that was zeroed to None: leave it to him with memory of its own."""
        old = self.held[index]
        self.held[index] = Held(old.slot, old.local, old.bounds, old.comm, old.name)
        old.local = old.local.clone()

    def _keep_aside(self) -> None:
        """Save what a window's gradients are to be added to: they are scaled by themselves.

        Stage 1 at every backward: its pieces lie in the memory that the next gradients are collected in.
        """
        self.kept = {index: self.held[index].local.clone() for index, has in enumerate(self.content) if has}
        if self.eager:
            self.content = [False] * len(self.params)

    def ready(self, index: int, *, again: bool) -> None:
        self.collect.scale = self.scale if not self.eager else 1.0 / self.comm.whole.world / self.root
        self.collect.ready(index, again=again)

    def hold(self) -> None:
        self.collect.held = True

    def launch_rest(self) -> None:
        self.collect.scale = self.scale if not self.eager else 1.0 / self.comm.whole.world / self.root
        self.collect.launch_rest()

    def _send(self, cell: Cell, flat: Tensor, bounds: Sequence[int]) -> Pending:
        """Stage 2: the sum goes straight into the shard where nothing stands there to be added to."""
        cell.in_place = self.eager and not any(self.content[index] for index in cell.bucket.slots)
        rank, out = self.comm.rank, None
        if cell.in_place:
            first = _own(self.slabs[cell.slab], rank)[0]
            out = self.shards[cell.slab][cell.bucket.bounds[rank] - first : cell.bucket.bounds[rank + 1] - first]
        shift = cell.bucket.bounds[0] - bounds[0]
        slots = [self.collect.where[index][1] for index in cell.bucket.slots]
        slots = [replace(slot, start=slot.start - shift) for slot in slots] if shift else slots
        return self.wire.reduce_scatter(cell.name, flat, bounds, slots, out)

    def _arrived(self, cell: Cell) -> None:
        """Stage 2: add this rank's part of a bucket to its shard."""
        if not self.eager or cell.in_place:
            return
        assert cell.buffer is not None
        rank, start = self.comm.rank, cell.span.start
        low, high = cell.bucket.bounds[rank], cell.bucket.bounds[rank + 1]
        slab = self.slabs[cell.slab]
        for index in cell.bucket.slots:
            slot = self.collect.where[index][1]
            a, b = max(low, slot.start), min(high, slot.start + slot.numel)
            if a < b:
                first = _own(slab, rank)[0]
                shard = self.shards[cell.slab][a - first : b - first]
                new = cell.buffer[a - start : b - start]
                shard.add_(new) if self.content[index] else shard.copy_(new)

    def finish(self, used: Sequence[bool]) -> None:
        collect = self.collect
        if not (collect.hide and collect.unhurried):
            collect.land()
        shown = self.given(used)
        collect.hidden = collect.hide
        if collect.hide:
            self.content = shown if self.eager else self.content
            return
        self._window(self.scale * self.comm.whole.world * self.root if self.eager else 1.0)
        for index, aside in self.kept.items():
            self.held[index].local.add_(aside)
            shown[index] = True
        self.kept = {}
        self._show(shown)

    def given(self, used: Sequence[bool]) -> list[bool]:
        """Which parameters get a gradient from what was exchanged."""
        return [a or b or c for a, b, c in zip(used, self.content, self.collect.filled, strict=True)]

    def shows(self, index: int) -> bool:
        """Whether parameter `index`'s gradient is the one kept here."""
        grad = self.params[index].grad
        return isinstance(grad, DividedGrad) and grad.held is self.held[index]

    def show(self, index: int) -> None:
        """Make it that."""
        self.params[index].grad = DividedGrad(self.held[index])

    def kept_of(self, index: int) -> Tensor:
        """What this rank keeps of it."""
        self.held[index].settle()
        return self.held[index].local

    def arrivals(self) -> list[Tensor]:
        """Where this rank's part of what was sent arrives: it has."""
        self.collect.land()
        self.content, self.window = [False] * len(self.params), 1.0
        if self.eager:
            return self.shards
        low, high = self.comm.rank, self.comm.rank + 1
        pairs = zip(self.slabs, self.collect.flats, strict=True)
        return [flat[slab.bounds[low] : slab.bounds[high]] for slab, flat in pairs]

    def _window(self, factor: float) -> None:
        """Stage 2: multiply what has been gathered by a window's factor, in place of the one it had."""
        if factor != self.window:
            for shard in self.shards:
                shard.mul_(factor / self.window)
            self.window = factor

    def _show(self, shown: list[bool]) -> None:
        self.collect.filled = [False] * len(self.params)
        squares = torch.stack([torch.linalg.vector_norm(held.local) for held in self.held]).double().square()
        if not self.comm.alone:
            squares = self.comm.exchange(f"norms/{self.name}", squares).sum(dim=0)
        for param, held, square, show in zip(self.params, self.held, squares.unbind(), shown, strict=True):
            held.square = square
            param.grad = DividedGrad(held) if show else None

    # The update.

    def restore(self) -> None:
        for index in self.put_away:
            self.params[index].grad = DividedGrad(self.held[index])
        self.put_away = []
        if not self.collect.hidden:
            self.kept = {}

    def wipe(self, index: int) -> None:
        self.collect.views[index].zero_()

    def assigned(self) -> bool:
        return any(p.grad is not None and not isinstance(p.grad, DividedGrad) for p in self.params)

    def update(self, step: Callable[[], Any]) -> Any:
        self.memory.fence()
        mine = self._pieces()
        try:
            result = step_on(self.optimizer, self.params, mine, step)
        finally:
            for index, piece in mine.items():
                piece.grad = DividedGrad(self.held[index]) if piece is self.params[index] else None
            self.memory.stepped()
        self.memory.agree()
        return result

    def _pieces(self) -> dict[int, Tensor]:
        """What this rank updates, with gradients: pieces of memory, or whole parameters."""
        out: dict[int, Tensor] = {}
        for k, slab, slot in self._slots():
            param, held = self.params[slot.index], self.held[slot.index]
            low, high = slab.piece(slot, self.comm.rank)
            if low == high or param.grad is None:
                continue
            held.settle()
            grad = held.local if isinstance(param.grad, DividedGrad) else held.mine(param.grad)
            first = slot.start - slab.bounds[self.comm.rank]
            piece = self.memory.own(k)[first + low : first + high]
            if self.whole:
                piece, grad = self.memory.whole(param, slot, piece), grad.as_strided(slot.shape, slot.stride)
            piece.grad = grad
            out[slot.index] = piece
        return out

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        return gather_state(self.optimizer, self.params, self.held, self.comm, whole=self.whole)

    def take_state(self) -> None:
        divide_state(self.optimizer, self.params, self.held, whole=self.whole)

    def own_state(self) -> dict[str, Tensor]:
        own = self.memory.own_state() if isinstance(self.memory, Shown) else {}
        return {**own, **{f"wire/{name}": value for name, value in self.wire.state().items()}}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.wire.take_state({k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")})
        if isinstance(self.memory, Shown):
            self.memory.take_own_state(state)

    def loaded(self) -> None:
        self.wire.take_state({})
        if isinstance(self.memory, Shown):
            self.memory.refill()

    def settle(self) -> None:
        if isinstance(self.memory, Shown):
            self.memory.settle()

    def consensus(self) -> dict[int, Tensor]:
        return self.memory.exactly() if isinstance(self.memory, Shown) else {}

    def keeps(self, index: int) -> Kept:
        held = self.held[index]
        low, high = held.bounds[self.comm.rank : self.comm.rank + 2]
        shape = None if self.whole else tuple(held.local.shape)
        return Kept(low=low, high=high, stride=tuple(held.slot.stride), shape=shape, copy=copy_of(self.comm))

    def bytes_held(self) -> dict[str, int]:
        grads = [*self.collect.buffers(), *self.shards]
        return {
            "parameters": self.memory.bytes_held(),
            "gradients": sum(map(bytes_of, grads)),
            "optimizer": self.bytes_of_state(),
            "left out": sum(map(bytes_of, self.wire.state().values())),
        }


def _own(slab: Slab, rank: int) -> tuple[int, int]:
    """First element and number of elements `rank` owns of a slab."""
    return slab.bounds[rank], slab.bounds[rank + 1] - slab.bounds[rank]


def _shard(slab: Slab, rank: int) -> Tensor:
    return torch.zeros(_own(slab, rank)[1], dtype=slab.dtype, device=slab.device)
