"""A shard: the parameters that one server keeps, as they travel and as its optimizer sees them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributedtorch.serve.board import Push, Refused

_ALIGN = 64


class Layout:
    """Where tensors lie in one message: which of them are there, then each of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.offsets = [_aligned(len(self.kinds))]
        for shape, dtype in self.kinds:
            self.offsets.append(_aligned(self.offsets[-1] + shape.numel() * dtype.itemsize))
        self.bytes = self.offsets[-1]

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A message; what is None is not there."""
        message = torch.zeros(self.bytes, dtype=torch.uint8)
        message[: len(self.kinds)] = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8)
        for tensor, view in zip(tensors, self.views(message), strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        return message

    def views(self, message: Tensor) -> Iterator[Tensor]:
        """Each tensor, in the message's memory."""
        for (shape, dtype), low in zip(self.kinds, self.offsets, strict=False):
            yield message[low : low + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def unpack(self, message: Tensor) -> list[Tensor | None]:
        """As `pack` was given them."""
        there = message[: len(self.kinds)].tolist()
        return [view if has else None for has, view in zip(there, self.views(message), strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Shard:
    """Parameters, their optimizer, and the values that workers get."""

    def __init__(self, params: Sequence[nn.Parameter], optimizer: Optimizer, compensate: float = 0.0) -> None:
        self.params, self.user, self.compensate = params, optimizer, compensate
        self.masters = [nn.Parameter(param.detach().to("cpu", copy=True)) for param in params]
        self.layout = Layout(self.masters)
        self.optimizer = self._beside(optimizer)
        self.given: dict[int, Tensor] = {}
        """By worker what it was given last, where delays are compensated."""
        self.refill()

    def _beside(self, given: Optimizer) -> Optimizer:
        """An optimizer of the same kind for what is kept here, without the user's hooks; options are read at a step."""
        made = copy.copy(given)
        made.__dict__ = {key: value for key, value in given.__dict__.items() if key != "step"}
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(made, hooks, OrderedDict())
        place = {id(param): master for param, master in zip(self.params, self.masters, strict=True)}
        made.param_groups = [
            {**group, "params": [place[id(param)] for param in group["params"] if id(param) in place]}
            for group in given.param_groups
        ]
        return made

    def refill(self) -> None:
        """Take over values and state that were put into the user's objects from outside."""
        self.optimizer.state = defaultdict(dict)
        for param, master in zip(self.params, self.masters, strict=True):
            master.data.copy_(param.detach())
            if param in self.user.state:
                self.optimizer.state[master] = _copied(self.user.state[param], torch.device("cpu"))
        self.message = self.layout.pack(self.masters)
        """What workers get: the present version."""
        self.given.clear()

    def publish(self) -> None:
        """Show the user's optimizer a copy of the state."""
        for param, master in zip(self.params, self.masters, strict=True):
            if self.optimizer.state.get(master):
                self.user.state[param] = _copied(self.optimizer.state[master], param.device)

    def check(self, message: Tensor) -> None:
        """Refuse what would spoil the parameters.

        Raises:
            Refused: Wrong size, or numbers that are not finite.
        """
        if message.numel() != self.layout.bytes:
            raise Refused(f"{message.numel()} bytes pushed, {self.layout.bytes} needed: gradients of another model?")
        for number, grad in enumerate(self.layout.unpack(message)):
            if grad is not None and not bool(torch.isfinite(grad).all()):
                raise Refused(f"the gradient of parameter {number} of this server has NaN or infinite numbers")

    def apply(self, pushes: Sequence[Push]) -> None:
        """One step with the mean of what was pushed."""
        for group, user in zip(self.optimizer.param_groups, self.user.param_groups, strict=True):
            group.update({key: value for key, value in user.items() if key != "params"})
        grads = [self._compensated(push) for push in pushes]
        for index, master in enumerate(self.masters):
            mine = [grad for one in grads if (grad := one[index]) is not None]
            master.grad = None
            if mine:
                master.grad = torch.zeros_like(master)
                for grad in mine:
                    master.grad.add_(grad)
                master.grad.div_(len(pushes))
        self.optimizer.step()
        self.message = self.layout.pack(self.masters)

    def _compensated(self, push: Push) -> list[Tensor | None]:
        """Gradients moved to the present parameters to first order, the square of the gradient for the curvature."""
        grads = self.layout.unpack(push.content)
        before = self.given.get(push.worker)
        if not self.compensate or before is None:
            return grads
        moved = [master.detach() - old for master, old in zip(self.masters, self.layout.views(before), strict=True)]
        return [
            None if grad is None else grad + self.compensate * grad.square() * move
            for grad, move in zip(grads, moved, strict=True)
        ]

    def give(self, worker: int) -> Tensor:
        """The present version, for a worker."""
        if self.compensate:
            self.given[worker] = self.message
        return self.message


def _copied(state: Any, device: torch.device) -> Any:
    """Nested state with tensors of its own; single numbers stay on the host."""
    if isinstance(state, Tensor):
        return state.detach().to(device if state.dim() else "cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value, device) for key, value in state.items()}
    return type(state)(_copied(value, device) for value in state) if type(state) in (list, tuple) else state
