"""The words bf16, fp16 and fp8: what is computed in which type.

Stored: parameters, gradients and optimizer state in float32. Computed: forwards and backwards under autocast, in
bfloat16 (bf16, fp8) or float16 (fp16); under fp8 also the products of linear layers in 8-bit floats. Summed over ranks:
float32. What a model returns is float32 again. The loss scale of fp16 is in `core.scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distributedtorch import float8
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import override
from distributedtorch.core.plan import Plan
from distributedtorch.core.scale import LossScale
from distributedtorch.core.world import World, accelerator

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def check(models: list[nn.Module], plan: Plan) -> None:
    """Refuse models and machines that cannot compute as the plan says."""
    if plan.precision is None:
        return
    if plan.precision == "fp8":
        float8.check(models)
    for model in models:
        wide = [(n, p.dtype) for n, p in model.named_parameters() if p.is_floating_point() and p.dtype != torch.float32]
        if wide:
            given = f"parameter {wide[0][0]!r} is {wide[0][1]} under a plan that computes in {plan.precision}"
            do = "model.float() before dt.distribute, or leave the word out of the plan"
            raise UsageError(explain(given, "parameters in torch.float32: they are kept so, and updated so", do))


def attach(models: list[nn.Module], plan: Plan, world: World) -> None:
    """Let the models' forwards compute as the plan says."""
    if plan.precision is None:
        return
    dtype = _DTYPES[plan.precision]
    keep = plan.sync != "zero3" or world.size == 1
    """Whether autocast may keep the copies it makes of parameters to the end of the forward."""
    if plan.precision == "fp8":
        world.undo += float8.attach(models)
    world.undo += [override(model, "forward", _narrow(model.forward, dtype, keep)) for model in models]
    if plan.precision == "fp16" and world.loop.loss_scale is None:
        world.loop.loss_scale = LossScale(world.comm)


def _narrow(own: Callable[..., Any], dtype: torch.dtype, keep: bool) -> Callable[..., Any]:
    kind = accelerator()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype, cache_enabled=keep):
            return tree_map(_widened, own(*args, **kwargs))

    return forward


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value
