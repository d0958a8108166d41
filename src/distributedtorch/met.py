"""Optimizers that were not given, met at their first step: made after `dt.distribute`, forgotten, or made anew.

Until then gradients of trainable parameters that no optimizer has are kept for it (`attach.rest`): under plans that
average gradients they are averaged from the first backward on, so that its first step is as exact as all others. One
that takes over parameters from an optimizer of the run takes its place.
"""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distributedtorch import attach, behind
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.step import Member
from distributedtorch.core.world import World
from distributedtorch.run import RUN

Attach = Callable[[Optimizer, list[Member]], None]
"""Gives the library an optimizer whose gradients some members have kept."""


def stand(world: World, take: Attach) -> None:
    """Meet optimizers at their first step from now on, and count the steps of those that are left as they are."""
    strangers: WeakSet[Optimizer] = WeakSet()
    own_hooks: list[list[tuple[dict[int, Any], dict[int, Any]]]] = []

    def before(given: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if world.loop.updating or given in strangers:
            return None
        if not _is_known(given):
            if _is_stranger(given, world):
                strangers.add(given)
                return None
            if world.size > 1 or world.loop.expects:
                loss = _first_step(given, [*args[1:], *kwargs.values()], world, take)
                own_hooks.append(_put_aside(given._optimizer_step_pre_hooks, given._optimizer_step_post_hooks))
                return _instead(given, args, kwargs, loss)
            take(given, [])
        if not _has_members(given, world):
            behind.before_step()
        return None

    def after(given: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args[0] is not given and own_hooks:
            for hooks, own in own_hooks.pop():
                hooks.update(own)
        elif not world.loop.updating and _is_known(given) and not _has_members(given, world):
            world.loop.stepped(())

    world.undo += [
        register_optimizer_step_pre_hook(before).remove,
        register_optimizer_step_post_hook(after).remove,
    ]


def _is_known(given: Optimizer) -> bool:
    return any(given is one for one in RUN.optimizers)


def _has_members(given: Optimizer, world: World) -> bool:
    return any(member.sync.optimizer is given for member in world.loop.members)


def _is_stranger(given: Optimizer, world: World) -> bool:
    """Whether an optimizer is left alone: it has no parameter of the run, or calls one of the run's optimizers."""
    if any(value is one for value in vars(given).values() for one in RUN.optimizers):
        return True
    ours = {id(param) for model in RUN.models for param in model.parameters()}
    ours |= {id(param) for member in world.loop.members for param in member.sync.params}
    mine = set(map(id, params_of(given)))
    return ours.isdisjoint(mine) if world.size > 1 or world.loop.expects else not mine <= ours


def params_of(given: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [param for group in given.param_groups for param in group["params"]]


def owners_of(given: Optimizer, world: World) -> list[Member]:
    """The members that keep gradients of an optimizer's parameters, with the others of the optimizers they are of."""
    mine = {id(param) for param in params_of(given)}
    found = [m for m in world.loop.members if any(id(param) in mine for param in m.sync.params)]
    theirs = {id(m.sync.optimizer) for m in found if m.sync.optimizer is not None}
    return [m for m in world.loop.members if m in found or id(m.sync.optimizer) in theirs]


def _first_step(given: Optimizer, args: Sequence[Any], world: World, take: Attach) -> Any:
    """The first `step` of an optimizer; result: the loss of its closure. A group call."""
    loop, loss = world.loop, None
    if loop.depth:
        raise UsageError(attach.INSIDE)
    for closure in filter(callable, args):
        with torch.enable_grad():
            loss = closure()
    loop.make_ready()
    owners = owners_of(given, world)
    _refuse(given, owners, world)
    if owners and loop.called(owners):
        take(given, owners)
        given.step()
    return loss


def _refuse(given: Optimizer, owners: Sequence[Member], world: World) -> None:
    """Refuse what cannot be made right at an optimizer's first step."""
    plan, kind = RUN.plan, type(given).__name__
    assert plan is not None
    kept = {id(param) for member in owners for param in member.sync.params}
    names = {id(p): name for model in RUN.models for name, p in model.named_parameters()}
    for param in params_of(given):
        if param.requires_grad and id(param) not in kept:
            raise UsageError(_not_kept(kind, names.get(id(param))))
    if not owners:  # all frozen
        return
    do = "give it to dt.distribute: model, optimizer, loader = dt.distribute(model, optimizer, loader)"
    if world.size > 1 and ((plan.delay and plan.lockstep) or plan.sync == "server"):
        given_text = f"{kind} steps and was not given to dt.distribute, under {plan}"
        raise UsageError(explain(given_text, "the optimizer when the exchange is set up", do))
    mine = {id(param) for param in params_of(given)}
    alone = kept <= mine and all(member.accumulate == plan.accumulate for member in owners)
    if plan.accumulate > 1 and not alone:
        given_text = f"{kind} was not given to dt.distribute and steps with some of the parameters, under {plan}"
        raise UsageError(explain(given_text, "to know which windows of batches are whose", do))


def _not_kept(kind: str, name: str | None) -> str:
    if name is None:
        given = f"{kind} steps with parameters of a distributed model and with others, which are in no model given"
        return explain(given, "one optimizer for what is distributed", "give all models to dt.distribute")
    given = f"{kind} trains {name!r}, which was frozen or not in the model when dt.distribute was called"
    do = (
        "call dt.distribute with all layers in place and trainable, and freeze afterwards (requires_grad_(False)); "
        "put no fully_shard around the model"
    )
    return explain(given, "parameters that have been distributed", do)


def _put_aside(*hooks: dict[int, Any]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Take out the hooks on one optimizer: they have been called around the update. Result: each with what it had."""
    own = [(some, dict(some)) for some in hooks]
    for some in hooks:
        some.clear()
    return own


def _instead(given: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> Any:
    """Arguments for torch's own `step` when all is done: an optimizer of the same kind with nothing to update."""
    empty = copy.copy(given)
    empty.__dict__ = {key: value for key, value in given.__dict__.items() if key != "step"}
    empty.param_groups = [{**group, "params": []} for group in given.param_groups]
    empty.state = defaultdict(dict)

    def done(value: Any) -> Any:
        return (lambda: loss) if callable(value) else value

    return (empty, *map(done, args[1:])), {key: done(value) for key, value in kwargs.items()}


def waiting() -> list[Optimizer]:
    """Optimizers in use over parameters that no optimizer of the run has, in the models' order; none where unclear."""
    places = {id(p): k for k, p in enumerate(p for model in RUN.models for p in model.parameters())}
    taken = {id(param) for one in RUN.optimizers for param in params_of(one)}
    gc.collect()
    found = sorted(_alive(places, taken), key=lambda one: min(places[id(p)] for p in params_of(one)))
    mine = [id(param) for one in found for param in params_of(one)]
    return found if len(set(mine)) == len(mine) else []


def _alive(places: dict[int, int], taken: set[int]) -> Iterator[Optimizer]:
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer):  # not isinstance: asking an object for its class may run code of its own
            groups = vars(one).get("param_groups", [])  # one that is being made has none
            mine = [id(param) for group in groups for param in group["params"]]
            if mine and all(key in places and key not in taken for key in mine):
                yield one
