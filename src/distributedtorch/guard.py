"""What a loop may do beside its plan that would be wrong in silence: refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distributedtorch import attach
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import World
from distributedtorch.decide import Plateau, agreed, number
from distributedtorch.inspect import WRAPPERS
from distributedtorch.launch.adopt import switch_off
from distributedtorch.report import say
from distributedtorch.run import RUN


def stand(plan: Plan, world: World) -> None:
    """Watch for what a loop may do beside the plan that would be wrong in silence."""
    if world.size > 1:
        _one_metric(world)
        _no_wrapper(world)
    if plan.accumulate > 1:
        _whole_windows(world)
    if plan.clip is not None:
        _one_clip(plan, world)
    if plan.precision is not None or plan.accumulate > 1 or not plan.exact:
        _one_scale(plan, world)


def _one_clip(plan: Plan, world: World) -> None:
    """Refuse torch's clip_grad_norm_ in a loop whose plan clips already."""
    within, name = torch.nn.utils.clip_grad, "_clip_grads_with_norm_"  # what every import of clip_grad_norm_ calls
    original = getattr(within, name, None)
    if original is None:
        return

    def refuse(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if float(max_norm) == float("inf"):  # only to know the norm
            return original(given, max_norm, *args, **kwargs)
        mine = {id(p) for member in world.loop.members for p in member.sync.params}
        if any(id(p) in mine for p in given):
            do = "take clip_grad_norm_ out of the loop, or clip= out of the plan"
            raise UsageError(explain(f"clip_grad_norm_ under a plan with clip={plan.clip:g}", "one of the two", do))
        return original(given, max_norm, *args, **kwargs)

    setattr(within, name, refuse)
    world.undo.append(lambda: setattr(within, name, original))


def _one_scale(plan: Plan, world: World) -> None:
    """Refuse a GradScaler where the plan has a loss scale, needs none, or leaves out steps it would have to see."""
    scale = torch.amp.GradScaler.scale
    word = plan.precision or (f"accumulate={plan.accumulate}" if plan.accumulate > 1 else str(plan))

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return scale(self, *args, **kwargs)
        do = f"take the GradScaler out of the loop (fp16 in the plan has a loss scale), or {word} out of the plan"
        raise UsageError(explain(f"a GradScaler under a plan with {word}", "one of the two", do))

    torch.amp.GradScaler.scale = refuse  # type: ignore[method-assign,assignment]
    world.undo.append(lambda: setattr(torch.amp.GradScaler, "scale", scale))


def _no_wrapper(world: World) -> None:
    """Take DistributedDataParallel off what is distributed already, as it is made; refuse its like."""

    def made(wrapper: nn.Module, _: str, inside: nn.Module) -> None:
        kind = type(wrapper).__name__
        if kind not in WRAPPERS:
            return
        ours = {id(module) for model in RUN.models for module in model.modules()}  # parameters may be others already
        if ours.isdisjoint(map(id, inside.modules())):
            return
        known = {id(param) for model in RUN.models for param in model.parameters()}
        if isinstance(wrapper, DistributedDataParallel) and known.issuperset(map(id, inside.parameters())):
            world.undo.append(switch_off(wrapper))
            return say(world, f"{kind} around {type(inside).__name__} does nothing, for that is distributed already")
        do = f"take {kind} out: dt.distribute does what it does, and returns the model to go on with"
        raise UsageError(explain(f"{kind} around a model after dt.distribute", "one of the two", do))

    world.undo.append(register_module_module_registration_hook(made).remove)


def _whole_windows(world: World) -> None:
    """Let schedulers count optimizer steps: inside a window of several batches `step` does nothing, on any of them."""

    def stand_before(kind: type[LRScheduler]) -> None:
        original = kind.step

        @wraps(original)
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            counts = getattr(self, "_step_count", 1) == 0  # its constructor's own step
            if counts or not any(member.calls for member in attach.trained_with(self.optimizer, world.loop)):
                original(self, *args, **kwargs)

        kind.step = step  # type: ignore[method-assign]
        world.undo.append(lambda: setattr(kind, "step", original))

    for kind in _with_step(LRScheduler):
        stand_before(kind)


def _with_step(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    """A class and those made from it, as far as they have a `step` of their own."""
    if "step" in vars(kind):
        yield kind
    for one in kind.__subclasses__():
        yield from _with_step(one)


def _one_metric(world: World) -> None:
    """See that a plateau scheduler that was not given judges the same number on all ranks."""
    original = ReduceLROnPlateau.step

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        trained = any(member.sync.optimizer is self.optimizer for member in world.loop.members)
        if trained and not isinstance(self, Plateau) and "step" not in vars(self):
            mine = number(metrics, "plateau")
            if agreed(mine, "plateau") != mine and not isnan(mine):
                given = f"a ReduceLROnPlateau of a distributed optimizer judges {mine:g} here, and others elsewhere"
                do = "give the scheduler to dt.distribute (it then judges the mean), or pass dt.mean(loss)"
                raise UsageError(explain(given, "one number on all ranks: learning rates would drift apart", do))
        original(self, metrics, *args, **kwargs)

    ReduceLROnPlateau.step = step  # type: ignore[method-assign,assignment]
    world.undo.append(lambda: setattr(ReduceLROnPlateau, "step", original))
