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
from distributedtorch.core.step import Member
from distributedtorch.core.sync import Sync, Trained
from distributedtorch.core.world import World
from distributedtorch.decide import NO_METRIC, Plateau, agreed
from distributedtorch.launch import record
from distributedtorch.recipes import wire_of_tables
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


def optimizer(given: Optimizer, models: list[nn.Module], plan: Plan, world: World, build: Callable[..., Any]) -> None:
    """Attach a sync to an optimizer's parameters, another one to its tables, and let `step` go through them."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    mine = [p for group in given.param_groups for p in group["params"]]
    trained = trained_by(given, models)
    sparse = tables(models) if world.size > 1 and plan.lockstep else set()
    number = str(len(world.loop.members))
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
    members = [world.loop.add(sync, plan.accumulate) for sync in syncs]
    frozen = [(names[id(p)], p) for p in mine if not p.requires_grad]
    _through(given, members, world, plan, frozen, names={id(p): names[id(p)] for p in mine})
    if any(sync.divided for sync in syncs):
        world.undo += _whole_state(given, syncs)
        world.undo.append(lambda: _make_plain(given, syncs))
    world.undo += [sync.settle for sync in syncs]


def _left(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, tuple[str, nn.Parameter]]:
    """Trainable parameters that no optimizer has."""
    owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return {id(p): (n, p) for m in models for n, p in m.named_parameters() if p.requires_grad and id(p) not in owned}


def none_left(models: list[nn.Module], optimizers: list[Optimizer], plan: Plan) -> None:
    """Refuse trainable parameters that no optimizer has, where gradients are averaged at first only."""
    left = [name for name, _ in _left(models, optimizers).values()]
    if left and optimizers:
        some = ", ".join(left[:3]) + (", ..." if left[3:] else "")
        given = f"trainable parameters that no optimizer has ({some}) under {plan}"
        needed = "an optimizer for each: clipping would count gradients that differ between ranks"
        do = "p.requires_grad_(False), pass all optimizers in one call, or leave `after` out"
        raise UsageError(explain(given, needed, do))


def rest(models: list[nn.Module], optimizers: list[Optimizer], world: World) -> None:
    """Average the gradients of trainable parameters that no optimizer has too: clipping and logging read them."""
    loop = world.loop
    for member in [m for m in loop.members if m.sync.optimizer is None]:
        loop.remove(member)
    left = _left(models, optimizers)
    if left and optimizers:
        sparse = tables(models)
        for rows, kind in ((False, "rest"), (True, "tables/rest")):
            some = [(n, p) for n, p in reversed(left.values()) if (id(p) in sparse) is rows]
            if some:
                names, params = (list(column) for column in zip(*some, strict=True))
                made = Sparse(params, names, None, world.comm, kind, divide=False) if rows else None
                loop.add(made or Ddp(params, names, None, world.comm, kind), 1)


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
    frozen: list[tuple[str, nn.Parameter]],
    *,
    names: dict[int, str],
) -> None:
    """Put the library's step before the optimizer's own, on this object only."""
    loop, clip = world.loop, plan.clip
    update = _hooked_around(given, members)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # type: ignore[attr-defined]
        for member in members:
            if not member.touched_since_step and member.sync.assigned():
                loop.exchange_assigned(member)
            member.calls += 1
        if not members[0].closing:
            return loss
        for member in members:
            loop.before_step(member)
        _refuse_strangers(self, names)
        _refuse_thawed(frozen)
        grads = [p.grad for member in members for p in member.sync.params if p.grad is not None]
        if loop.loss_scale is not None and not loop.loss_scale.finite(total_norm(grads)):
            loop.stepped(members)
            return loss
        if clip is not None:
            _clip(members, total_norm(grads), clip)
        for act in loop.before_update:
            act()
        result = update()
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


def _refuse_strangers(given: Optimizer, names: dict[int, str]) -> None:
    for group in given.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise UsageError(
                explain(
                    "the optimizer has parameters it did not have at dt.distribute (add_param_group)",
                    "all parameters in the optimizer at dt.distribute",
                    "add the group before dt.distribute, with lr=0 or requires_grad_(False) until it is to train",
                )
            )


def _refuse_thawed(frozen: list[tuple[str, nn.Parameter]]) -> None:
    for name, param in frozen:
        if param.grad is not None:
            raise UsageError(
                explain(
                    f"parameter {name!r} was frozen when dt.distribute was called and has a gradient now",
                    "parameters that are to train have requires_grad=True at dt.distribute",
                    "call dt.distribute with all of them trainable and freeze afterwards (requires_grad_(False))",
                )
            )


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
    """A scheduler counts optimizer steps: inside a window of `accumulate` batches its `step` does nothing.

    Torch's plateau scheduler judges the mean over ranks of the metrics passed to its `step`.
    """
    member = next((m for m in world.loop.members if getattr(m.sync, "optimizer", None) is given.optimizer), None)
    window = member if member is not None and member.accumulate > 1 else None
    local = isinstance(given, ReduceLROnPlateau) and not isinstance(given, Plateau) and world.size > 1
    if "step" in vars(given) or (window is None and not local):
        return
    original, save = given.step, given.state_dict

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if window is not None and window.calls:
            return
        if local:
            kwargs = _same_metric(args, kwargs)
            args = args[1:]
        original(*args, **kwargs)

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
