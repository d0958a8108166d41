"""What a loop may do beside its plan that would be wrong in silence: refused in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import wraps
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distributedtorch import attach
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.step import Member
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
        if plan.lockstep and plan.sync != "zero3":
            _one_replica(world)
        if plan.lockstep:
            _first_derivatives(world)
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


_OFTEN, _SEEN = 64, 8
"""Steps between two comparisons of replicas (at first steps 0, 1, 2, 4, ...), and elements looked at per parameter."""
_ROUNDING = 1e4
"""By how many times the accuracy of their type replicas may be apart: processors of two kinds round in two ways."""


def _one_replica(world: World) -> None:
    """See that replicas stay the same: a few elements of every parameter, and the optimizers' numbers, now and then."""
    began, compared = world.loop.steps, [-1]

    def compare(_: Sequence[Member]) -> None:
        step = world.loop.steps - began
        if step == compared[0] or (step & (step - 1) and step % _OFTEN):
            return
        compared[0] = step
        named = [*_options(world), *_elements(world)]
        mine = torch.cat([values for _, values, _ in named]) if named else torch.zeros(0, dtype=torch.float64)
        every = world.comm.exchange("replicas", mine)
        at = 0
        for name, values, tolerance in named:
            theirs = every[:, at : at + len(values)]
            at += len(values)
            apart = (theirs - theirs[:1]).abs().amax(dim=1) > tolerance * theirs.abs().amax()
            if apart.any():
                raise DesyncError(_parted(name, theirs, step))

    world.loop.after_exchange.append(compare)
    world.undo.append(lambda: world.loop.after_exchange.remove(compare))


def _options(world: World) -> Iterator[tuple[str, Tensor, float]]:
    """What optimizers are told in numbers, learning rates first of all."""
    optimizers = {id(m.sync.optimizer): m.sync.optimizer for m in world.loop.members if m.sync.optimizer is not None}
    for one in optimizers.values():
        for place, group in enumerate(one.param_groups):
            for key, value in group.items():
                if isinstance(value, float):
                    name = f"{key} of group {place} of {type(one).__name__}"
                    yield name, torch.tensor([value], dtype=torch.float64), 1e-9


def _elements(world: World) -> Iterator[tuple[str, Tensor, float]]:
    """Some elements of every parameter, from the first to the last."""
    for member in world.loop.members if all(m.sync.lockstep for m in world.loop.members) else ():
        for name, param in zip(member.sync.names, member.sync.params, strict=True):
            if param.numel() and param.is_floating_point():
                places = torch.linspace(0, param.numel() - 1, min(_SEEN, param.numel())).long()
                values = param.detach()[torch.unravel_index(places.to(param.device), param.shape)]
                tolerance = min(_ROUNDING * torch.finfo(param.dtype).eps, 0.1)
                yield f"parameter {name!r}", values.double().cpu().reshape(-1), tolerance


def _parted(name: str, theirs: Tensor, step: int) -> str:
    """The message for replicas that are not the same any more."""
    place = int((theirs - theirs[:1]).abs().amax(dim=0).argmax())
    said = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(theirs[:, place].tolist()))
    return explain(
        f"{name} differs between ranks after step {step}: {said}",
        "the same parameters and learning rates on all ranks at every step",
        "look for what is set by one rank's own numbers: values drawn after dt.distribute (nn.init), an update by "
        "hand, a learning rate or a choice that follows this rank's loss (dt.mean(loss) is the same on all ranks)",
    )


def _first_derivatives(world: World) -> None:
    """Refuse a loss made of gradients by `torch.autograd.grad`: those are of this rank's rows."""
    original, made = torch.autograd.grad, list[Any]()

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(outputs, inputs, *args, **kwargs)
        ours = {id(param) for member in world.loop.members for param in member.sync.params}
        asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if any(id(one) in ours for one in asked):
            made[:] = [one.grad_fn for one in found if one is not None and one.grad_fn is not None]
        return found

    def look(roots: Sequence[Tensor], _: object) -> None:
        if made and _leads_to([root.grad_fn for root in roots], made):
            raise UsageError(_OF_ROWS)
        made.clear()

    torch.autograd.grad = grad
    world.loop.observers.append(look)
    world.undo += [lambda: setattr(torch.autograd, "grad", original), lambda: world.loop.observers.remove(look)]


def _leads_to(roots: Sequence[Any], goals: Sequence[Any]) -> bool:
    """Whether a graph has one of these nodes."""
    todo, seen = [node for node in roots if node is not None], set[Any]()
    while todo:
        node = todo.pop()
        if node in goals:
            return True
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
    return False


_OF_ROWS = explain(
    "a loss made of gradients of parameters (torch.autograd.grad with create_graph=True, as in MAML)",
    "a loss that is a mean over rows: the gradients in it are of this rank's rows, not of the whole batch",
    "run this loop in one process",
)
