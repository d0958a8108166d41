"""A shard: the parameters that one server keeps, as they travel and as its optimizer sees them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

    def options(self) -> list[dict[str, Any]]:
        """The user's options of each group at present, as far as they are numbers, words or lists of them."""
        return [
            {key: plain for key, value in group.items() if (plain := _plain(value)) is not _NOT_PLAIN}
            for group in self.user.param_groups
        ]

    def apply(self, pushes: Sequence[Push], options: Sequence[Mapping[str, Any]] | None = None) -> None:
        """One step with the mean of what was pushed, with the user's present options or with those given."""
        for group, new in zip(self.optimizer.param_groups, options or self.user.param_groups, strict=True):
            group.update({key: _tuples(value) for key, value in new.items() if key != "params"})
        grads = [self.layout.unpack(push.content) for push in pushes]
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

    def compensated(self, push: Push) -> Push:
        """Gradients moved to the present parameters to first order, the square of the gradient for the curvature."""
        before = self.given.get(push.worker)
        if not self.compensate or before is None:
            return push
        grads = self.layout.unpack(push.content)
        moved = [master.detach() - old for master, old in zip(self.masters, self.layout.views(before), strict=True)]
        there = [
            None if grad is None else grad + self.compensate * grad.square() * move
            for grad, move in zip(grads, moved, strict=True)
        ]
        return replace(push, content=self.layout.pack(there))

    def state(self) -> dict[str, Any]:
        """Everything that is kept here."""
        found = [self.optimizer.state.get(master, {}) for master in self.masters]
        return {"parameters": [master.detach() for master in self.masters], "optimizer": found}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.optimizer.state = defaultdict(dict)
        for master, values, found in zip(self.masters, state["parameters"], state["optimizer"], strict=True):
            master.data.copy_(values)
            if found:
                self.optimizer.state[master] = found
        self.message = self.layout.pack(self.masters)

    def give(self, worker: int) -> Tensor:
        """The present version, for a worker."""
        if self.compensate:
            self.given[worker] = self.message
        return self.message


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """An option that can be written down, or `_NOT_PLAIN`."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts) else parts
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _copied(state: Any, device: torch.device) -> Any:
    """Nested state with tensors of its own; single numbers stay on the host."""
    if isinstance(state, Tensor):
        return state.detach().to(device if state.dim() else "cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value, device) for key, value in state.items()}
    return type(state)(_copied(value, device) for value in state) if type(state) in (list, tuple) else state
