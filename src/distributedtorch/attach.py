"""Rewiring the user's objects in place: weights, random streams, optimizer steps, schedulers, recomputation."""

from __future__ import annotations

import random
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

from distributedtorch.core.blocks import blocks_in
from distributedtorch.core.bucket import is_empty, once
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import in_copies, override, without
from distributedtorch.core.plan import Plan
from distributedtorch.core.scale import total_norm
from distributedtorch.core.step import Loop, Member
from distributedtorch.core.sync import Sync, Trained
from distributedtorch.core.world import World
from distributedtorch.decide import NO_METRIC, Plateau, agreed
from distributedtorch.launch import record
from distributedtorch.recipes import wire_of_tables
from distributedtorch.sync.alone import Alone
from distributedtorch.sync.ddp import Ddp
from distributedtorch.sync.gradient import DividedGrad
from distributedtorch.sync.rows import Rows, large_tables
from distributedtorch.sync.sparse import Sparse, tables


def same_weights(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not is_empty(tensor):
            comm.broadcast(f"initial {name}", once(tensor))


def own_randomness(rank: int, step: int = 0) -> None:
    """Let random layers draw other numbers on every rank, and after every `step`; rank 0's stay as they were."""
    if rank == 0:
        return
    seed = (torch.initial_seed() + rank * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def trained_by(given: Optimizer, models: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters that an optimizer trains, in the order in which their gradients come.

    That is the models' order reversed, which all ranks have alike; groups made from sets of names have another one in
    every process.
    """
    mine = {id(p) for group in given.param_groups for p in group["params"] if p.requires_grad}
    ordered = {id(p): p for model in models for p in model.parameters()}
    return [p for p in reversed(ordered.values()) if id(p) in mine]


Build = Callable[[Trained, Plan, World], Sync]


def optimizer(given: Optimizer, models: list[nn.Module], plan: Plan, world: World, build: Build) -> None:
    """Attach a sync to an optimizer's parameters, another one to its tables, and let `step` go through them."""
    outer, world.undo = world.undo, []
    try:
        members = _attached(given, models, plan, world, build)
    finally:
        acts, world.undo = world.undo, outer

        def undo() -> None:
            while acts:
                acts.pop()()

        world.undo.append(undo)
    for member in members:
        member.let_go = undo


def _attached(given: Optimizer, models: list[nn.Module], plan: Plan, world: World, build: Build) -> list[Member]:
    """Make the syncs of an optimizer and put its `step` through them; what undoes that is added to the world's."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    mine = [p for group in given.param_groups for p in group["params"]]
    trained = trained_by(given, models)
    sparse = tables(models) if world.size > 1 and plan.lockstep else set()
    number = world.loop.number()
    rows, rest_ = [p for p in trained if id(p) in sparse], [p for p in trained if id(p) not in sparse]
    way = wire_of_tables(plan, world)
    few = large_tables(models) if way is not None else set()
    some, dense = [p for p in rest_ if id(p) in few], [p for p in rest_ if id(p) not in few]
    syncs: list[Sync] = []
    if rows and plan.delay:
        do = "sparse=False, or another plan"
        raise UsageError(explain(f"sparse gradients under {plan}", "a plan that exchanges rows at once", do))
    if dense or not rows + some:
        said = [names[id(p)] for p in dense]
        part = Trained(
            params=dense,
            names=said,
            optimizer=given,
            models=models,
            name=number,
            block=plan.block,
            share=plan.share,
        )
        syncs.append(build(part, plan, world))
    if rows:
        said = [names[id(p)] for p in rows]
        syncs.append(Sparse(rows, said, given, world.comm, f"tables/{number}", divide=plan.sync != "ddp"))
    if some and way is not None:
        said = [names[id(p)] for p in some]
        syncs.append(Rows(some, said, given, world.comm, f"rows/{number}", wire=way))
    members = [world.loop.add(sync, plan.accumulate, number) for sync in syncs]
    frozen = [(names[id(p)], p) for p in mine if not p.requires_grad]
    guards: list[Callable[[int], None]] = [
        partial(_refuse_strangers, given, {id(p) for p in mine}),
        partial(_refuse_thawed, frozen),
        _refuse_replaced(models, trained),
    ]
    _through(given, members, world, plan, guards)
    if any(sync.divided for sync in syncs):
        world.undo += _whole_state(given, syncs)
        world.undo.append(lambda: _make_plain(given, syncs))
    world.undo += [sync.settle for sync in syncs]
    return members


def let_go(members: list[Member], world: World) -> None:
    """Make plain again what some members keep, gradients included, and forget the members. A group call."""
    loop = world.loop
    for member in members:
        loop.before_step(member)
    for member in members:
        member.let_go()
        if member.let_go in world.undo:
            world.undo.remove(member.let_go)
        loop.remove(member)
        for param in member.sync.params:  # it may look into memory of the sync
            param.grad = None if param.grad is None else param.grad.clone()


def hand_over(members: list[Member], *, touched: bool) -> None:
    """Let new members go on with the gradients that `let_go` has left; `touched`: as with those of a backward."""
    for member in members if touched else ():
        member.touched_since_step = True
        member.sync.begin(exchange=True, hide=False)
        member.sync.restore()


def trained_with(given: Optimizer, loop: Loop) -> list[Member]:
    """The members of an optimizer; of one that was not given yet, those that keep its gradients for it."""
    mine = [member for member in loop.members if member.sync.optimizer is given]
    params = {id(param) for group in given.param_groups for param in group["params"]} if not mine else set()
    return mine or [
        member
        for member in loop.members
        if member.sync.optimizer is None and any(id(param) in params for param in member.sync.params)
    ]


def left(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, tuple[str, nn.Parameter]]:
    """Trainable parameters that no optimizer has."""
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return {id(p): (n, p) for m in models for n, p in m.named_parameters() if p.requires_grad and id(p) not in owned}


def none_left(models: list[nn.Module], optimizers: list[Optimizer], plan: Plan) -> None:
    """Refuse trainable parameters that no optimizer has, where gradients are averaged at first only."""
    names = [name for name, _ in left(models, optimizers).values()]
    if names and optimizers:
        some = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        given = f"trainable parameters that no optimizer has ({some}) under {plan}"
        needed = "an optimizer for each: clipping would count gradients that differ between ranks"
        do = "p.requires_grad_(False), pass all optimizers in one call, or leave `after` out"
        raise UsageError(explain(given, needed, do))


def rest(
    models: list[nn.Module], optimizers: list[Optimizer], plan: Plan, world: World, *, touched: bool = False
) -> None:
    """Treat gradients of trainable parameters that no optimizer has as those of others: an optimizer may come later.

    They are averaged under plans that do so; clipping and logging read them. Where no optimizer is there at all this is
    put off to the first backward: one that is given in time gets memory of its own.
    """
    old = [member for member in world.loop.members if member.sync.optimizer is None]
    touched = touched or any(member.touched_since_step for member in old)
    let_go(old, world)
    world.loop.stand()
    settled = plan.sync == "zero3" or plan.share  # where frozen ones are
    known = [p for model in models for p in model.parameters() if p.requires_grad or not settled]
    world.loop.before_backward = [lambda: hand_over(_rest(models, optimizers, plan, world, known), touched=touched)]
    if optimizers and plan.lockstep and world.size > 1:
        world.loop.make_ready()


def _rest(
    models: list[nn.Module], optimizers: list[Optimizer], plan: Plan, world: World, known: list[nn.Parameter]
) -> list[Member]:
    """Members for what is left of the parameters that were there when this was put off."""
    sparse, many = tables(models), world.size > 1 and plan.begins_in_lockstep
    there = set(map(id, known))
    syncs: list[Sync] = []
    for rows, kind in ((False, "rest"), (True, "tables/rest")):
        found = [(n, p) for n, p in reversed(left(models, optimizers).values()) if id(p) in there]
        some = [(n, p) for n, p in found if (many and id(p) in sparse) is rows]
        if some:
            names, params = (list(column) for column in zip(*some, strict=True))
            if not many:
                syncs.append(Alone(params, names, None, world.comm))
                syncs[-1].lockstep = plan.lockstep
            elif rows:
                syncs.append(Sparse(params, names, None, world.comm, kind, divide=False))
            else:
                syncs.append(Ddp(params, names, None, world.comm, kind))
    return [world.loop.add(sync, 1 if optimizers else plan.accumulate) for sync in syncs]


def frozen(models: list[nn.Module], treat: Callable[[list[nn.Parameter], list[str]], Any]) -> None:
    """Treat parameters that nothing trains as the plan says."""
    kept = [(n, p) for m in models for n, p in m.named_parameters() if type(p) is nn.Parameter and not p.requires_grad]
    once = {id(p): (n, p) for n, p in kept}
    if once:
        names, params = (list(column) for column in zip(*once.values(), strict=True))
        treat(params, names)


def _through(
    given: Optimizer,
    members: list[Member],
    world: World,
    plan: Plan,
    guards: list[Callable[[int], None]],
) -> None:
    """Put the library's step before the optimizer's own, on this object only.

    `guards` are told before each update how many parameters have gradients.
    """
    loop, clip = world.loop, plan.clip
    update = _hooked_around(given, members)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # type: ignore[attr-defined]
        if loop.depth:
            raise UsageError(INSIDE)
        if not loop.called(members):
            return loss
        for member in members:
            loop.before_step(member)
        grads = [p.grad for member in members for p in member.sync.params if p.grad is not None]
        for refuse in guards:
            refuse(len(grads))
        if loop.loss_scale is not None and not loop.loss_scale.finite(total_norm(grads)):
            loop.stepped(members)
            return loss
        if clip is not None:
            _clip(members, total_norm(grads), clip)
        for act in loop.before_update:
            act()
        loop.updating = True
        try:
            result = update()
        finally:
            loop.updating = False
        loop.stepped(members)
        record.note(loop.steps)
        return result if closure is None else loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    world.undo.append(override(given, "step", step))


def _hooked_around(given: Optimizer, members: list[Member]) -> Callable[[], Any]:
    """The update of all members; the optimizer's hooks stand around it: they are to see whole parameters.

    They stay inside where `step` was replaced on the object: then nothing says where the hooks are called.
    """
    replaced, own = given.__dict__.get("step"), type(given).step
    inside = not hasattr(own, "hooked") or not (replaced is None or hasattr(replaced, "_wrapped_by_lr_sched"))
    update = given.step if inside else partial(own.__wrapped__, given)  # type: ignore[attr-defined]
    for member in members:
        update = partial(member.sync.update, update)
    return update if inside else partial(Optimizer.profile_hook_step(lambda *_: update()), given)


def _clip(members: list[Member], norm: Tensor, most: float) -> None:
    """As torch's clip_grad_norm_, which knows no sparse gradients."""
    params = [p for member in members for p in member.sync.params if p.grad is not None]
    clip_grads_with_norm_([p for p in params if not p.grad.is_sparse], most, norm)  # type: ignore[union-attr]
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))


def _refuse_strangers(given: Optimizer, known: set[int], _: int) -> None:
    for group in given.param_groups:
        if any(id(param) not in known for param in group["params"]):
            raise UsageError(
                explain(
                    "the optimizer has parameters it did not have at dt.distribute (add_param_group)",
                    "all parameters in the optimizer at dt.distribute",
                    "add the group before dt.distribute, with lr=0 or requires_grad_(False) until it is to train",
                )
            )


INSIDE = explain(
    "optimizer.step() inside a backward (in a hook on a parameter)",
    "a step after the backward: gradients are this rank's own until it has ended",
    "call optimizer.step() after loss.backward()",
)


def _refuse_thawed(frozen: list[tuple[str, nn.Parameter]], _: int) -> None:
    for name, param in frozen:
        if param.grad is not None:
            raise UsageError(
                explain(
                    f"parameter {name!r} was frozen when dt.distribute was called and has a gradient now",
                    "parameters that are to train have requires_grad=True at dt.distribute",
                    "call dt.distribute with all of them trainable and freeze afterwards (requires_grad_(False))",
                )
            )


def _refuse_replaced(models: list[nn.Module], trained: list[nn.Parameter]) -> Callable[[int], None]:
    """Refuses other parameters in the places of some that are trained; looked at where fewer get gradients."""
    mine, most = {id(param) for param in trained}, len(trained)
    places = [(model, {n: id(p) for n, p in model.named_parameters() if id(p) in mine}) for model in models]

    def refuse(count: int) -> None:
        nonlocal most
        before, most = most, count
        for model, was in places if count < before else ():
            for name, param in model.named_parameters():
                if was.get(name, id(param)) != id(param) and param.requires_grad:
                    raise UsageError(_replaced(name, param))

    return refuse


def _replaced(name: str, param: nn.Parameter) -> str:
    if type(param.data).__name__ == "DTensor":
        given = f"parameter {name!r} has become a DTensor since dt.distribute (fully_shard, tensor parallel)"
        return explain(given, "the parameters that the model had", 'take it out: plan="zero3" divides parameters')
    now = f"another one ({tuple(param.shape)} on {param.device}) in the place of the one that is trained"
    given = f"parameter {name!r} is {now} (model.to(...), a new layer)"
    do = "move or change the model before dt.distribute"
    return explain(given, "the parameters that the model had at dt.distribute", do)


def _whole(given: Optimizer, syncs: list[Sync]) -> Any:
    """The optimizer's state as one process would hold it. A group call."""
    whole: Any = defaultdict(dict, given.state)
    for sync in syncs:
        whole.update(sync.whole_state())
    return whole


def _whole_state(given: Optimizer, syncs: list[Sync]) -> list[Callable[[], None]]:
    """`state_dict` and `load_state_dict` speak of whole tensors, as in one process. Result: undo."""
    save, load = given.state_dict, given.load_state_dict

    def state_dict(self: Optimizer) -> dict[str, Any]:
        divided = self.state
        self.state = _whole(given, syncs)
        try:
            return save()
        finally:
            self.state = divided

    def load_state_dict(self: Optimizer, state: dict[str, Any]) -> None:
        load(state)
        for sync in syncs:
            sync.take_state()

    def change(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": _whole(given, syncs)} if "state" in state else state

    overrides = [override(given, "state_dict", state_dict), override(given, "load_state_dict", load_state_dict)]
    return [*overrides, in_copies(given, change)]


def _make_plain(given: Optimizer, syncs: list[Sync]) -> None:
    """Give every rank all of the optimizer's state and of the gradients shown, for good. A group call."""
    given.state = _whole(given, syncs)
    for param in [param for sync in syncs for param in sync.params]:
        if isinstance(param.grad, DividedGrad):
            param.grad.held.settle()
            param.grad = param.grad.held.full()


_MADE: list[weakref.ref[LRScheduler]] = []


def note_made(given: LRScheduler) -> None:
    """`dt.schedule` has made one: it need not be given to `dt.distribute`."""
    _MADE.append(weakref.ref(given))


def made() -> list[LRScheduler]:
    """The schedulers that `dt.schedule` has made and that are in use, in that order."""
    return [one for ref in _MADE if (one := ref()) is not None]


def scheduler(given: LRScheduler, world: World) -> None:
    """Torch's plateau scheduler judges the mean over ranks of the metrics passed to its `step`."""
    local = isinstance(given, ReduceLROnPlateau) and not isinstance(given, Plateau) and world.size > 1
    if "step" in vars(given) or not local:
        return
    original, save = given.step, given.state_dict

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if any(member.calls for member in trained_with(given.optimizer, world.loop)):
            return
        original(*args[1:], **_same_metric(args, kwargs))

    def state_dict(self: LRScheduler) -> dict[str, Any]:
        return without(self, save())  # type: ignore[no-any-return]

    world.undo += [override(given, "step", step), override(given, "state_dict", state_dict)]


def _same_metric(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    metric = args[0] if args else kwargs.get("metrics")
    if metric is None:
        raise UsageError(NO_METRIC)
    return {**kwargs, "metrics": agreed(metric, "plateau")}


def recompute(models: list[nn.Module], named: str | None) -> list[Callable[[], None]]:
    """Compute activations of blocks again in backward instead of keeping them. Result: undo."""
    return [override(block, "forward", _recomputed(block.forward)) for block in blocks_in(models, named)]


def _recomputed(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, **kwargs)

    return forward
