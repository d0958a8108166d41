"""Distributed data parallel: every rank holds everything, gradients are averaged behind backward.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

Each rank holds: parameters Psi, gradients Psi, optimizer state K x Psi.
Travels per step and rank: 2 Psi (N-1)/N, the all-reduce of gradients.
Use it when the model and its optimizer state fit every rank. Do not when they do not: zero1, zero2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.plan import Traits
from distributedtorch.core.sync import Sync, bytes_of
from distributedtorch.core.wire import Wire, travelling
from distributedtorch.sync.collect import Cell, Collect
from distributedtorch.wire.plain import Plain

TRAITS = Traits(lockstep=True, owns="none", places="rank")


class Ddp(Sync):
    """Replicas that average their gradients."""

    def __init__(
        self,
        params: list[nn.Parameter],
        names: list[str],
        optimizer: torch.optim.Optimizer | None,
        comm: Comm,
        name: str,
        *,
        wire: Wire | None = None,
    ) -> None:
        self.params, self.names, self.optimizer, self.comm, self.scale = params, names, optimizer, comm, 1.0
        self.wire = wire or Plain(comm)
        slabs = travelling(params, self.wire, comm.world, owned=False)
        self.collect = Collect(params, slabs, comm, self._send, name=f"gradients/{name}", keep=True)

    def _send(self, cell: Cell, flat: Tensor, bounds: Sequence[int]) -> Pending:
        slots = [self.collect.where[index][1] for index in cell.bucket.slots]
        return self.wire.all_reduce(cell.name, flat, bounds, slots)

    @property
    def filled(self) -> list[bool]:
        return self.collect.filled

    def begin(self, *, exchange: bool, hide: bool) -> None:
        self.collect.apart = self.windowed or self.root != 1.0 or self.wire.lossy
        self.collect.begin(exchange=exchange, hide=hide)
        self.collect.put_away()

    def ready(self, index: int, *, again: bool) -> None:
        self.collect.scale = self.scale
        self.collect.ready(index, again=again)

    def hold(self) -> None:
        self.collect.held = True

    def launch_rest(self) -> None:
        self.collect.scale = self.scale
        self.collect.launch_rest()

    def finish(self, used: Sequence[bool]) -> None:
        collect = self.collect
        collect.land()
        collect.hidden = collect.hide
        if collect.hide:
            return
        collect.show(add=True)
        for param, view, given in zip(self.params, collect.views, self.given(used), strict=True):
            if given and param.grad is None:
                param.grad = view
        collect.filled = [False] * len(self.params)

    def given(self, used: Sequence[bool]) -> list[bool]:
        """Which parameters get a gradient from what was exchanged."""
        return [a or b for a, b in zip(used, self.collect.filled, strict=True)]

    def shows(self, index: int) -> bool:
        """Whether parameter `index`'s gradient is the one kept here."""
        return self.params[index].grad is self.collect.views[index]

    def show(self, index: int) -> None:
        """Make it that."""
        self.params[index].grad = self.collect.views[index]

    def kept_of(self, index: int) -> Tensor:
        """What this rank keeps of it."""
        return self.collect.views[index]

    def arrivals(self) -> list[Tensor]:
        """Where what was sent arrives: it has."""
        self.collect.land()
        return self.collect.flats

    def restore(self) -> None:
        if not self.collect.hidden:
            self.collect.show(add=False)

    def wipe(self, index: int) -> None:
        self.collect.views[index].zero_()

    def assigned(self) -> bool:
        return any(p.grad is not None and p.grad is not v for p, v in zip(self.params, self.collect.views, strict=True))

    def update(self, step: Callable[[], Any]) -> Any:
        return step()

    def own_state(self) -> dict[str, Tensor]:
        return {f"wire/{name}": value for name, value in self.wire.state().items()}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.wire.take_state({name.removeprefix("wire/"): value for name, value in state.items()})

    def loaded(self) -> None:
        self.wire.take_state({})

    def bytes_held(self) -> dict[str, int]:
        return {
            "parameters": sum(p.numel() * p.element_size() for p in self.params),
            "gradients": sum(b.numel() * b.element_size() for b in self.collect.buffers()),
            "optimizer": self.bytes_of_state(),
            "left out": sum(map(bytes_of, self.wire.state().values())),
        }
