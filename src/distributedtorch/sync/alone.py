"""One process: gradients stay where autograd puts them, and only windows of several batches are added up.

Holds parameters Psi, gradients Psi, optimizer state K Psi; nothing travels. Every sync word means this at one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Sync, bytes_of


class Alone(Sync):
    """Gradients as autograd makes them; also the frame for those that are exchanged as they are."""

    eager = True

    def __init__(
        self, params: list[nn.Parameter], names: list[str], optimizer: torch.optim.Optimizer | None, comm: Comm
    ) -> None:
        self.params, self.names, self.optimizer, self.comm, self.scale = params, names, optimizer, comm, 1.0
        self.inside: list[Tensor | None] = [None] * len(params)
        """Sums of the backwards of a window that is still open."""
        self.before: list[Tensor | None] = [None] * len(params)
        """Gradients that were shown when the window began: the new ones are added to them."""
        self.shown: list[weakref.ref[Tensor] | None] = [None] * len(params)
        self.hide = self.open = False

    @property
    def apart(self) -> bool:
        """Whether autograd may not add a backward's gradients to those shown: the new ones are still to be scaled."""
        return self.windowed or self.root != 1.0

    @property
    def filled(self) -> list[bool]:
        return [False] * len(self.params)

    @property
    def pending(self) -> bool:
        return self.open and any(grad is not None for grad in self.inside)

    def begin(self, *, exchange: bool, hide: bool) -> None:
        self.hide = hide
        for index, param in enumerate(self.params):
            if self.apart and param.grad is not None:
                self.before[index], param.grad = param.grad, None
            elif not self.open:
                self.before[index] = None

    def ready(self, index: int, *, again: bool) -> None:
        pass

    def hold(self) -> None:
        pass

    def launch_rest(self) -> None:
        pass

    def finish(self, used: Sequence[bool]) -> None:
        if self.apart:
            new = [None if param.grad is None else self._unscaled(param.grad) for param in self.params]
            self._add(new)
        self.remember()

    def remember(self) -> None:
        """Know again the gradients shown; the user may let go of them."""
        self.shown = [None if param.grad is None else weakref.ref(param.grad) for param in self.params]

    def _unscaled(self, grad: Tensor) -> Tensor:
        return grad.div_(self.root) if self.root != 1.0 else grad

    def _add(self, new: Sequence[Tensor | None]) -> None:
        """Add a backward's gradients, means over ranks, to the window, and show it where it ends."""
        for index, grad in enumerate(new):
            old = self.inside[index]
            self.inside[index] = grad if old is None else old if grad is None else old + grad
            self.params[index].grad = None
        self.open = self.hide
        if not self.hide:
            self._show(self.scale * self.comm.world * self.root)

    def _show(self, factor: float) -> None:
        for index, param in enumerate(self.params):
            new, before = self.inside[index], self.before[index]
            if new is not None and factor != 1.0:
                new = new.mul_(factor)
            param.grad = before if new is None else new if before is None else _sum(before, new)
        self.inside, self.before = [None] * len(self.params), [None] * len(self.params)

    def restore(self) -> None:
        for index, before in enumerate(self.before):
            if before is not None and not self.open:
                self.params[index].grad, self.before[index] = before, None

    def wipe(self, index: int) -> None:
        raise AssertionError("what is exchanged at every backward leaves nothing to wipe")

    def assigned(self) -> bool:
        pairs = zip(self.params, self.shown, strict=True)
        return any(p.grad is not None and (ref is None or p.grad is not ref()) for p, ref in pairs)

    def update(self, step: Callable[[], Any]) -> Any:
        return step()

    def bytes_held(self) -> dict[str, int]:
        return {
            "parameters": sum(bytes_of(param) for param in self.params),
            "gradients": sum(bytes_of(param.grad) for param in self.params if param.grad is not None),
            "optimizer": self.bytes_of_state(),
        }


def _sum(before: Tensor, new: Tensor) -> Tensor:
    """In the memory of the earlier gradient, as autograd does it: that may be the user's."""
    return before + new if before.is_sparse or new.is_sparse else before.add_(new)
