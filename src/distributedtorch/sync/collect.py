"""Gradients into slabs as backward finishes them; buckets leave in order as they fill.

Kept gradients (ddp, zero1): one slab per run of parameters holds them all, `p.grad` is a view of it.
Passing gradients (zero2): a bucket's memory lives only while it travels; at most `_AHEAD` travel at once, unless they
may take their time (`delay`): then a backward waits for a bucket only where it needs that one again.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Bucket, Slab, Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.errors import UsageError, explain

_AHEAD = 2
_HELD_HERE = 2  # by the list, and by the question
_TWICE = explain(
    "a parameter got more of its gradient after that had been sent to the other ranks",
    "one gradient per parameter and backward",
    "use torch.utils.checkpoint with use_reentrant=False",
)
_SPARSE = explain(
    "a parameter got a sparse gradient, but is the weight of no module that says so",
    "nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., sparse=True)",
    "use such a module for the table, or sparse=False in torch.nn.functional.embedding",
)


class Cell:
    """One bucket's state during a backward."""

    def __init__(self, slab: int, bucket: Bucket, name: str) -> None:
        self.slab, self.bucket, self.name = slab, bucket, name
        self.missing = len(bucket.slots)
        self.came: set[int] = set()
        self.buffer: Tensor | None = None
        """The bucket's own memory, where gradients only pass through."""
        self.pending: Pending | None = None
        self.in_place = False
        """Whether the result goes to where it is kept without a stop in the bucket."""

    @property
    def span(self) -> slice:
        return slice(self.bucket.bounds[0], self.bucket.bounds[-1])

    def arrived(self) -> bool:
        return self.pending is not None and self.pending.arrived()


Send = Callable[[Cell, Tensor, Sequence[int]], Pending]


class Collect:
    """Takes gradients of `params` and sends full buckets by `send`."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        slabs: Sequence[Slab],
        comm: Comm,
        send: Send,
        *,
        name: str,
        keep: bool,
        arrived: Callable[[Cell], None] | None = None,
    ) -> None:
        self.params, self.slabs, self.comm, self.send, self.keep = params, slabs, comm, send, keep
        self.arrived = arrived
        self.where: dict[int, tuple[int, Slot]] = {s.index: (k, s) for k, slab in enumerate(slabs) for s in slab.slots}
        self.flats = [comm.pool.zeros(slab.numel, slab.dtype, slab.device) for slab in slabs] if keep else []
        self.views = [self._view(index) for index in range(len(params))] if keep else []
        self.cells = [
            Cell(k, bucket, f"{name}/{k}.{b}") for k, slab in enumerate(slabs) for b, bucket in enumerate(slab.buckets)
        ]
        self.of_param: list[list[Cell]] = [[] for _ in params]
        for cell in self.cells:
            for index in cell.bucket.slots:
                self.of_param[index].append(cell)
        self.filled = [False] * len(params)
        """Whether a slab holds gradients of earlier batches of the window that `p.grad` does not show."""
        self.scaled = [False] * len(params)
        self.aside: dict[int, Tensor] = {}
        """Exchanged gradients that `p.grad` showed before this window: what it gives is added to them."""
        self.next = 0
        self.travelling: deque[Cell] = deque()
        self.exchange, self.hide, self.held = True, False, False
        self.hidden = False
        """Whether a window is open: earlier backwards gave gradients that are not shown."""
        self.scale = 1.0
        self.unhurried = False
        """Whether what is sent may travel on when its backward is over."""
        self.apart = False
        """Whether a window's factor makes old and new gradients scale differently (`accumulate`)."""

    def begin(self, *, exchange: bool, hide: bool) -> None:
        """Make ready for a backward."""
        self.exchange, self.hide, self.next, self.held = exchange, hide, 0, False
        self.scaled = [False] * len(self.params)
        if self.keep:
            self._let_go()
        for cell in self.cells:
            cell.missing = len(cell.bucket.slots)
            cell.came.clear()

    def ready(self, index: int, *, again: bool) -> None:
        """Take parameter `index`'s gradient, and send the buckets that are full now."""
        param = self.params[index]
        if param.grad is not None and param.grad.layout != torch.strided:
            raise UsageError(_SPARSE)
        if again and self._sent(index):
            raise UsageError(_TWICE)
        if self.keep:
            self._keep(index, param)
        else:
            self._pass(index, param, again=again)
        if self.exchange and not again:
            for cell in self.of_param[index]:
                cell.missing -= 1
            if not self.held:
                self._launch_full()

    def _sent(self, index: int) -> bool:
        """Whether parameter `index`'s gradient is on its way, or scaled to go."""
        return (self.keep and self.scaled[index]) or any(cell.pending is not None for cell in self.of_param[index])

    def _keep(self, index: int, param: nn.Parameter) -> None:
        """Bring a gradient into its slab, scaled on the way where it is about to be sent."""
        grad, view = param.grad, self.views[index]
        assert grad is not None
        scale = self.scale if self.exchange and not self.held else 1.0
        if grad is not view and not self.filled[index]:
            torch.mul(grad, scale, out=view) if scale != 1.0 else view.copy_(grad)
        else:
            if grad is not view:
                view.add_(grad)
            if scale != 1.0:
                view.mul_(scale)
        self.scaled[index] = self.exchange and not self.held
        self.filled[index] = self.hide
        param.grad = None if self.hide else view

    def _let_go(self) -> None:
        """Where the user still holds a gradient that was zeroed to None, leave it to him with memory of its own."""
        for index, param in enumerate(self.params):
            if param.grad is not None and param.grad is not self.views[index]:
                refuse_buffer(param.grad, self.flats)
            elif param.grad is None and sys.getrefcount(self.views[index]) > _HELD_HERE:
                view = self.views[index]
                view.data = view.clone()
                self.views[index] = self._view(index)

    def put_away(self) -> None:
        """Take shown gradients out of autograd's way where old and new ones are scaled differently."""
        if not self.hidden:
            self.aside.clear()
        for index, param in enumerate(self.params if self.apart else ()):
            if param.grad is self.views[index]:
                self.aside[index] = self.views[index].clone()
                param.grad = None

    def show(self, *, add: bool) -> None:
        """Show again what `put_away` took, with what has come since or as it was."""
        for index, before in self.aside.items():
            view = self.views[index]
            self.params[index].grad = view.add_(before) if add else view.copy_(before)
        self.aside.clear()

    def _pass(self, index: int, param: nn.Parameter, *, again: bool) -> None:
        grad = param.grad
        assert grad is not None
        param.grad = None
        slot = self.where[index][1]
        flat = storage_order(grad, slot)
        for cell in self.of_param[index]:
            low = max(cell.span.start, slot.start)
            high = min(cell.span.stop, slot.start + slot.numel)
            there = self._memory(cell)[low - cell.span.start : high - cell.span.start]
            here = flat[low - slot.start : high - slot.start]
            there.add_(here, alpha=self.scale) if again else torch.mul(here, self.scale, out=there)
            cell.came.add(index)

    def _memory(self, cell: Cell) -> Tensor:
        if cell.pending is not None:  # of an earlier backward
            self.travelling.remove(cell)
            self._land(cell)
        if cell.buffer is None:
            slab = self.slabs[cell.slab]
            cell.buffer = self.comm.pool.borrow(cell.span.stop - cell.span.start, slab.dtype, slab.device, shared=True)
        return cell.buffer

    def _complete(self, cell: Cell) -> Tensor:
        """The bucket's memory with zeros where no gradient came, and in the padding."""
        memory, start, at = self._memory(cell), cell.span.start, cell.span.start
        for index in cell.bucket.slots:
            slot = self.where[index][1]
            low, high = max(slot.start, start), min(slot.start + slot.numel, cell.span.stop)
            at = max(at, high)
            if index not in cell.came:
                memory[low - start : high - start].zero_()
        memory[at - start :].zero_()
        return memory

    def _launch_full(self) -> None:
        while self.next < len(self.cells) and self.cells[self.next].missing == 0:
            self._launch(self.cells[self.next])
            self.next += 1

    def launch_rest(self) -> None:
        """Begin what waits for gradients that did not come: they count as zero."""
        if self.keep:
            for index, param in enumerate(self.params):
                if not self.scaled[index]:
                    self._scale(index, param)
        while self.next < len(self.cells):
            self._launch(self.cells[self.next])
            self.next += 1

    def _scale(self, index: int, param: nn.Parameter) -> None:
        """Scale what stands in the slab from before, or make it zero where nothing does."""
        view = self.views[index]
        if param.grad is not view and not self.filled[index]:
            view.zero_()
        elif self.scale != 1.0:
            view.mul_(self.scale)

    def _launch(self, cell: Cell) -> None:
        if self.keep:
            flat, bounds = self.flats[cell.slab], cell.bucket.bounds
        else:
            while self.travelling and self._is_due(self.travelling[0]):
                self._land(self.travelling.popleft())
            flat, bounds = self._complete(cell), tuple(b - cell.span.start for b in cell.bucket.bounds)
        cell.pending = self.send(cell, flat, bounds)
        self.travelling.append(cell)

    def _is_due(self, first: Cell) -> bool:
        """Whether to land the first bucket under way before another leaves."""
        if not self.unhurried:
            return len(self.travelling) >= _AHEAD or first.arrived()
        assert first.pending is not None
        return first.pending.work is not None and first.arrived()  # None: only a stream knows, and would be held

    def land(self) -> None:
        """Wait until everything sent has arrived."""
        for cell in self.travelling:
            assert cell.pending is not None
            cell.pending.advance()
        while self.travelling:
            self._land(self.travelling.popleft())

    def _land(self, cell: Cell) -> None:
        assert cell.pending is not None
        cell.pending.wait()
        cell.pending = None
        if self.arrived is not None:
            self.arrived(cell)
        if cell.buffer is not None:
            self.comm.pool.give_back([cell.buffer])
            cell.buffer = None

    def _view(self, index: int) -> Tensor:
        slab, slot = self.where[index]
        return slot.view(self.flats[slab])

    def buffers(self) -> Iterator[Tensor]:
        """The memory kept between backwards."""
        yield from self.flats


def refuse_buffer(grad: Tensor, ours: Sequence[Tensor] = ()) -> None:
    """Refuse a gradient that looks into a larger tensor of the user's: what is exchanged would not be seen there."""
    base = grad._base
    if base is not None and not any(base is flat for flat in ours):
        given = "p.grad is a view of a larger tensor (a flat buffer of gradients)"
        needed = "gradients of their own: those of all ranks could not be put into that tensor unseen"
        raise UsageError(explain(given, needed, "leave p.grad to backward(), and read the global gradients from it"))


def storage_order(grad: Tensor, slot: Slot) -> Tensor:
    """The gradient's elements in the order its parameter has them in memory."""
    if grad.stride() != slot.stride:
        same = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device)
        grad = same.copy_(grad)
    return grad.as_strided((slot.numel,), (1,))
