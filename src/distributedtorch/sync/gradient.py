"""The gradient of a parameter whose reduced values are divided over ranks: `p.grad` under zero1 and zero2.

It has the parameter's shape and behaves like the global gradient. Norms come back as plain global numbers (the squared
2-norms of all parameters travel once, at the end of backward, so reading them exchanges nothing and may be done on one
rank). Elementwise edits by scalars or by tensors of the same shape act on this rank's piece. Anything else gathers the
whole gradient first: that is an exchange, all ranks must do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm

aten = torch.ops.aten


class Held:
    """What stands behind a divided gradient and all its aliases."""

    def __init__(self, slot: Slot, local: Tensor, bounds: Sequence[int], comm: Comm, name: str) -> None:
        self.slot = slot
        self.local = local
        """This rank's piece, one-dimensional, in the parameter's memory order."""
        self.bounds = bounds
        """Element ranges of all ranks' pieces, counted from the parameter's first element."""
        self.comm, self.name = comm, name
        self.square: Tensor | None = None
        """The global squared 2-norm, while known."""
        self.seen_through: Tensor | None = None
        """The whole gradient some view of which is in the user's hands: writing to that must count."""

    def settle(self) -> None:
        """Take over what was written through views of the whole gradient."""
        if self.seen_through is not None:
            mine = self.mine(self.seen_through)
            if not torch.equal(mine, self.local):
                self.local.copy_(mine)
                self.square = None
            self.seen_through = None

    def full(self) -> Tensor:
        """The whole gradient as a plain tensor (all ranks must ask)."""
        flat = torch.empty(self.slot.numel, dtype=self.local.dtype, device=self.local.device)
        rank = self.comm.rank
        flat[self.bounds[rank] : self.bounds[rank + 1]] = self.local
        self.comm.all_gather(f"gradient of {self.name}", flat, self.bounds).wait()
        return flat.as_strided(self.slot.shape, self.slot.stride)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor of the gradient's shape."""
        same = torch.empty_strided(self.slot.shape, self.slot.stride, dtype=whole.dtype, device=whole.device)
        flat = same.copy_(whole).as_strided((self.slot.numel,), (1,))
        return flat[self.bounds[self.comm.rank] : self.bounds[self.comm.rank + 1]]

    def norm(self, order: float) -> Tensor:
        """The global vector norm."""
        if order == 2 and self.square is not None:
            return self.square.sqrt().to(self.local.dtype)
        if order == float("inf"):
            mine = self.local.abs().amax() if self.local.numel() else self.local.new_zeros(())
            return self.comm.exchange(f"norm of {self.name}", mine.double()).amax().to(self.local.dtype)
        mine = self.local.double().abs().pow(order).sum()
        total = self.comm.exchange(f"norm of {self.name}", mine).sum()
        return total.pow(1.0 / order).to(self.local.dtype)


class DividedGrad(Tensor):
    """`p.grad` where no rank holds all of it."""

    held: Held

    @staticmethod
    def __new__(cls, held: Held) -> DividedGrad:
        out: DividedGrad = Tensor._make_wrapper_subclass(
            cls, held.slot.shape, strides=held.slot.stride, dtype=held.local.dtype, device=held.local.device
        )
        out.held = held
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        _settle(args)
        rule = _RULES.get(func)
        if rule is not None:
            done, result = rule(func, args, kwargs)
            if done:
                return result
        return _gathered(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.held.full())

    def numpy(self, *, force: bool = False) -> Any:
        return self.held.full().numpy(force=force)

    def tolist(self) -> Any:
        return self.held.full().tolist()

    def share_memory_(self) -> DividedGrad:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.held.full()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.full().__reduce_ex__(protocol)


_NOT = (False, None)


def _settle(args: Any) -> None:
    for value in args:
        for grad in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(grad, DividedGrad):
                grad.held.settle()


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Run on whole plain gradients; write changed ones back to the pieces."""
    whole: dict[int, tuple[Held, Tensor]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, DividedGrad):
            if id(value.held) not in whole:
                whole[id(value.held)] = (value.held, value.held.full())
            return whole[id(value.held)][1]
        return value

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if func.is_view:
        for held, tensor in whole.values():
            held.seen_through = tensor
    if func._schema.is_mutable:
        for held, tensor in whole.values():
            held.local.copy_(held.mine(tensor))
            held.square = None
        first = args[0]
        return first if isinstance(first, DividedGrad) else result
    return result


def _norm(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    order = args[1] if len(args) > 1 and args[1] is not None else 2
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim or (len(args) > 3 and args[3]) or kwargs.get("dtype") is not None or order == 0:
        return _NOT
    return True, args[0].held.norm(float(order))


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    order = float(args[1]) if len(args) > 1 else 2.0
    return True, [
        g.held.norm(order) if isinstance(g, DividedGrad) else torch.linalg.vector_norm(g, order) for g in args[0]
    ]


def _local(held: Held, value: Any) -> Any:
    """An operand as this rank's piece needs it, or None where it cannot be told."""
    if isinstance(value, DividedGrad):
        return value.held.local if value.held.bounds == held.bounds else None
    if isinstance(value, Tensor) and value.dim() > 0:
        return held.mine(value) if value.shape == held.slot.shape else None
    return value


def _inplace(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    first = args[0]
    if not isinstance(first, DividedGrad):
        return _NOT
    held = first.held
    operands = [_local(held, value) for value in args[1:]]
    if any(now is None and was is not None for now, was in zip(operands, args[1:], strict=True)):
        return _NOT
    func(held.local, *operands, **kwargs)
    _follow(held, func, operands)
    return True, first


def _follow(held: Held, func: Any, operands: list[Any]) -> None:
    """Keep the known norm true through the edits that clipping and zeroing make."""
    name = func._schema.name
    scalar = operands and (not isinstance(operands[0], Tensor) or operands[0].dim() == 0)
    if held.square is not None and name in ("aten::mul_", "aten::div_") and scalar:
        factor = torch.as_tensor(operands[0]).to(held.square)
        held.square = held.square * factor.square() if name == "aten::mul_" else held.square / factor.square()
    else:
        held.square = torch.zeros_like(held.square) if held.square is not None and name == "aten::zero_" else None


def _foreach_inplace(single: Callable[..., Any]) -> Callable[..., tuple[bool, Any]]:
    def rule(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        rest = args[1:]
        for k, grad in enumerate(args[0]):
            mine = [value[k] if isinstance(value, (list, tuple)) else value for value in rest]
            single(grad, *mine, **kwargs)
        return True, None

    return rule


def _alias(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, DividedGrad(args[0].held)


def _unscale(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """GradScaler: unscale the pieces; an infinity on any rank counts on all."""
    grads, found, inverse = args
    pieces = [g.held.local if isinstance(g, DividedGrad) else g for g in grads]
    func(pieces, found, inverse)
    comm = next(g.held.comm for g in grads if isinstance(g, DividedGrad))
    found.copy_(comm.exchange("found infinity", found).amax(dim=0))
    for grad in grads:
        if isinstance(grad, DividedGrad) and grad.held.square is not None:
            grad.held.square = grad.held.square * inverse.double().square().to(grad.held.square)
    return True, None


_INPLACE = (
    *(aten.mul_.Scalar, aten.mul_.Tensor, aten.div_.Scalar, aten.div_.Tensor, aten.add_.Scalar, aten.add_.Tensor),
    *(aten.sub_.Scalar, aten.sub_.Tensor, aten.zero_.default, aten.fill_.Scalar, aten.neg_.default, aten.abs_.default),
    *(aten.sign_.default, aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default),
    *(aten.nan_to_num_.default, aten.copy_.default, aten.addcmul_.default, aten.addcdiv_.default),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor),
)
_RULES: dict[Any, Callable[..., tuple[bool, Any]]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten._foreach_mul_.Scalar: _foreach_inplace(aten.mul_.Scalar),
    aten._foreach_mul_.Tensor: _foreach_inplace(aten.mul_.Tensor),
    aten._foreach_mul_.ScalarList: _foreach_inplace(aten.mul_.Scalar),
    aten._foreach_div_.Scalar: _foreach_inplace(aten.div_.Scalar),
    aten._foreach_div_.Tensor: _foreach_inplace(aten.div_.Tensor),
    aten._foreach_zero_.default: _foreach_inplace(aten.zero_.default),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys(_INPLACE, _inplace),
}
