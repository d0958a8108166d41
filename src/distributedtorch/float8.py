"""Linear layers in 8-bit floats, on GPUs that have them.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor by one scale from its present largest value; the
products are summed in float32. Only `nn.Linear` with sizes that are multiples of 16 (the hardware's); all else is as
under bf16. Use it where large products are most of a step; do not where layers are small: rounding costs more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import override
from distributedtorch.core.world import accelerator

_LEAST = (8, 9)
"""The first compute capability with products of 8-bit floats."""
_UNIT = 16


def check(models: list[nn.Module]) -> None:
    """Refuse a machine without 8-bit floats, and models in which nothing would use them."""
    if accelerator() != "cuda" or torch.version.hip or torch.cuda.get_device_capability() < _LEAST:
        here = torch.cuda.get_device_name() if accelerator() == "cuda" else f"no such GPU ({accelerator()})"
        needed = "an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper)"
        raise UsageError(explain(f"fp8 on a machine with {here}", needed, "write bf16 instead of fp8"))
    if not any(True for model in models for _ in _layers(model)) and models:
        needed = "at least one nn.Linear whose sizes are multiples of 16"
        raise UsageError(explain("fp8 for a model without layers that can use it", needed, "write bf16 instead"))


def attach(models: list[nn.Module]) -> list[Callable[[], None]]:
    """Let linear layers compute in 8-bit floats. Result: undo."""
    return [override(layer, "forward", forward) for model in models for layer in _layers(model)]


def _layers(model: nn.Module) -> list[nn.Linear]:
    linear = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    return [layer for layer in linear if layer.in_features % _UNIT == 0 == layer.out_features % _UNIT]


def forward(self: nn.Linear, x: Tensor) -> Tensor:
    off = not torch.is_autocast_enabled(x.device.type)  # somebody has switched it off for this part
    if off or x.dim() < 2 or not x.numel():
        return F.linear(x, self.weight, self.bias)
    out: Tensor = _Product.apply(x.to(torch.bfloat16), self.weight)  # type: ignore[no-untyped-call]
    return out if self.bias is None else out + self.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """x @ weight.T in 8-bit floats, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = _multiply(_rounded(x.flatten(0, -2)), _rounded(weight), torch.bfloat16)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grads, scale = _rounded(rows, torch.float8_e5m2)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _multiply((grads, scale), _turned(_rounded(weight)), x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = _rounded(x.flatten(0, -2))
            to_weight = _multiply(_turned((_padded(grads), scale)), _turned(_padded_pair(inputs)), weight.dtype)
        return to_x, to_weight


_Scaled = tuple[Tensor, Tensor]
"""A tensor in 8-bit floats, and what to multiply it by."""


def _rounded(tensor: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> _Scaled:
    most = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / most).clamp(min=1e-12)
    return (tensor / scale).clamp(-most, most).to(dtype).contiguous(), scale


def _multiply(left: _Scaled, right: _Scaled, dtype: torch.dtype) -> Tensor:
    """left @ right.T; both lie by rows."""
    return torch._scaled_mm(left[0], right[0].t(), left[1], right[1], out_dtype=dtype)


def _turned(pair: _Scaled) -> _Scaled:
    return pair[0].t().contiguous(), pair[1]


def _padded_pair(pair: _Scaled) -> _Scaled:
    return _padded(pair[0]), pair[1]


def _padded(rows: Tensor) -> Tensor:
    """With rows of zeros up to what the hardware sums at a time."""
    more = -len(rows) % _UNIT
    if not more:
        return rows
    zeros = torch.zeros(more, rows.shape[1], dtype=torch.uint8, device=rows.device)
    return torch.cat([rows.view(torch.uint8), zeros]).view(rows.dtype)
