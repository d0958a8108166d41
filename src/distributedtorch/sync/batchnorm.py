"""Synchronised batch normalisation, on any device: statistics of the global batch in every training forward.

Ioffe & Szegedy 2015; statistics combined as in Chan, Golub & LeVeque 1979.

Each rank holds nothing more. Travels per layer and step: 2C+1 numbers forward, 2C backward, to every rank.
Used under every sync while its replicas step together; a rank without samples is masked out. Differentiating twice
through it is refused. The module keeps its class, its parameters and its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import override
from distributedtorch.core.step import Loop

_loop: list[Loop] = []


def count(model: nn.Module) -> int:
    """How many batch normalisations a model has."""
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module, loop: Loop) -> list[Callable[[], None]]:
    """Make every batch normalisation of `model`, and of deep copies of it, use the global batch. Result: undo."""
    _loop[:] = [loop]
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [override(module, "forward", forward, deep=True) for module in found]


def forward(self: _BatchNorm, input: Tensor) -> Tensor:
    """The forward of a synchronised module: its own outside training, and where replicas step alone by now."""
    if not self.training or not _loop[0].in_lockstep:
        own = _BatchNorm if isinstance(self, nn.SyncBatchNorm) else type(self)  # that one's own asks for a GPU
        return own.forward(self, input)
    if input.dim() < 2 or (input.dim() == 2 and isinstance(self, (nn.BatchNorm2d, nn.BatchNorm3d))):
        self._check_input_dim(input)
    output, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps, _loop[0], _known())
    if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
        _follow(self, mean, var, count)
    return output  # type: ignore[no-any-return]


def _follow(self: _BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Move the running statistics as one process would."""
    assert self.running_mean is not None and self.running_var is not None
    factor = self.momentum
    if self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
    assert factor is not None
    with torch.no_grad():
        unbiased = var * (count / (count - 1))
        self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
        self.running_var.mul_(1 - factor).add_(unbiased.to(self.running_var.dtype), alpha=factor)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        input, weight, bias, eps, loop, known = given
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [d for d in range(wide.dim()) if d != 1]
        shape = [1, -1] + [1] * (wide.dim() - 2)
        mean, var, count, copies = _global_moments(wide, dims, loop, known)
        rows = count / copies
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.loop, ctx.dims, ctx.shape = loop, dims, shape
        ctx.idle = known is not None and known.mine == 0
        ctx.mark_non_differentiable(mean, var, rows)
        gain = inverse if weight is None else inverse * weight
        output = (wide - mean.view(shape)) * gain.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype), mean, var, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(_TWICE)
        input, weight, mean, inverse, count = ctx.saved_tensors
        shape, dims, loop = ctx.shape, ctx.dims, ctx.loop
        grad = grads[0].to(mean.dtype)
        if loop.void:
            grad = grad.nan_to_num(0.0, math.inf, -math.inf)
        centred = input.to(mean.dtype) - mean.view(shape)
        sum_grad, sum_product = grad.sum(dims), (grad * centred).sum(dims)
        share = 0.0 if ctx.idle else loop.share
        both = loop.comm.exchange("batchnorm backward", torch.stack([sum_grad, sum_product]) * share).sum(dim=0)
        gain = inverse if weight is None else inverse * weight
        to_input = None
        if ctx.needs_input_grad[0]:
            slope = (both[1] * inverse.square() / count).view(shape)
            inner = grad * share - (both[0] / count).view(shape) - centred * slope
            inner = inner / share if share else torch.zeros_like(inner)  # a row that stands in for none has no part
            to_input = (inner * gain.view(shape)).to(input.dtype)
        to_weight = (sum_product * inverse).to(weight.dtype) if weight is not None else None
        to_bias = sum_grad.to(weight.dtype) if weight is not None else None
        return to_input, to_weight, to_bias, None, None, None


def _known() -> Rows | None:
    """What loaders say of the batch in use; nothing where they may not have handed it out."""
    rows = _loop[0].rows
    return rows if rows is None or rows.copies > 1 or torch.is_grad_enabled() or rows.mine == 0 else None


def _global_moments(
    input: Tensor, dims: list[int], loop: Loop, known: Rows | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Mean, variance and count over the rows of all ranks that have any; and how many ranks have each row."""
    channels = input.shape[1]
    here = 0.0 if known is not None and known.mine == 0 else float(input.numel() // max(channels, 1))
    mean = input.mean(dims)
    deviations = (input - mean.view([1, -1] + [1] * (input.dim() - 2))).square().sum(dims)
    parts = loop.comm.exchange("batchnorm forward", torch.cat([mean.new_tensor([here]), mean, deviations]))
    counts = parts[:, :1]
    means, squares = parts[:, 1 : channels + 1], parts[:, channels + 1 :]
    count = counts.sum()
    if float(count) <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    active = counts > 0
    mean = (torch.where(active, means, 0) * counts).sum(0) / count
    spread = squares + counts * (means - mean).square()
    copies = 1 if known is None else known.copies
    if known is None and bool((parts == parts[0]).all()):  # a batch that every rank has whole
        copies = loop.comm.world
    return mean, torch.where(active, spread, 0).sum(0) / count, count, copies


_TWICE = explain(
    "a second derivative through a synchronised BatchNorm (create_graph=True)",
    "batch statistics of all ranks can be differentiated once",
    "use LayerNorm, InstanceNorm or GroupNorm in a network under a gradient penalty",
)
