"""Learning how many backwards make one optimizer step, so that a loop that accumulates by hand exchanges once.

Two windows of equal length k are a guess, put to the vote in the control message. If all ranks agree, one window is
probed: gradients are exchanged as before, but a read of `p.grad` before the k-th backward is noticed. If no rank read
any, later windows exchange at the k-th backward only; `p.grad` then shows a stand-in that exchanges when it is used.
A wrong guess costs time, never correctness: `step` and any read exchange what is still local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
WATCH, PROBE, DEFER = range(3)


class Window:
    """What is known about one optimizer's steps."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.position = 0
        """Backwards since the last step, of any model: the same count on all ranks."""
        self.serial = 0
        """Counts all backwards, so that a stand-in of an earlier one is told from a present one."""
        self.period = 0
        self.stage = WATCH
        self.read = False
        """A stand-in was used since the last backward."""
        self.blocked = False
        """Gradients are read inside windows: exchange at every backward for good."""
        self.open = False
        """Some backward of this window has not been exchanged."""

    def begin(self) -> None:
        """A backward begins."""
        self.blocked = self.blocked or self.read
        self.read = False
        self.position += 1
        self.serial += 1

    @property
    def inside(self) -> bool:
        """Whether the present backward is not expected to be the window's last."""
        return 0 < self.position < self.period and not self.blocked

    @property
    def defers(self) -> bool:
        return self.stage == DEFER and self.inside

    @property
    def probes(self) -> bool:
        return self.stage == PROBE and self.inside

    def vote(self) -> float:
        """The length of windows this rank expects; 0 for none."""
        if self.blocked:
            return 0.0
        if len(self.lengths) == 2 and self.lengths[0] == self.lengths[1] > 1:
            return float(self.lengths[0])
        return float(self.period) if self.lengths and self.lengths[-1] <= self.period else 0.0

    def agreed(self, votes: list[float]) -> None:
        """Take in all ranks' votes."""
        if min(votes) != max(votes) or votes[0] == 0:
            self.next = (0, WATCH)
        elif votes[0] != self.period:
            self.next = (int(votes[0]), PROBE)
        else:
            self.next = (self.period, DEFER)

    next = (0, WATCH)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self.position:
            self.lengths = [*self.lengths[-1:], self.position]
        self.period, self.stage = self.next
        self.position, self.read, self.open = 0, False, False


class StandIn(Tensor):
    """`p.grad` while it is not to be looked at without notice; any use of it calls `resolve` and goes on with that."""

    resolve: Callable[[], Tensor]
    clear: Callable[[], None]

    @staticmethod
    def __new__(cls, like: Tensor, resolve: Callable[[], Tensor], clear: Callable[[], None]) -> StandIn:
        out: StandIn = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        out.resolve, out.clear = resolve, clear
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:
            return StandIn(args[0], args[0].resolve, args[0].clear)
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            return _zero(func, args[0])

        def real(value: Any) -> Any:
            return value.resolve() if isinstance(value, StandIn) else value

        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.resolve())

    def numpy(self, *, force: bool = False) -> Any:
        return self.resolve().numpy(force=force)

    def tolist(self) -> Any:
        return self.resolve().tolist()

    def share_memory_(self) -> StandIn:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.resolve().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolve().__reduce_ex__(protocol)


def _zero(func: Any, target: Any) -> Any:
    """`zero_grad(set_to_none=False)` needs no exchange."""
    for grad in target if isinstance(target, (list, tuple)) else [target]:
        grad.clear() if isinstance(grad, StandIn) else grad.zero_()
    return target if isinstance(target, Tensor) else None
