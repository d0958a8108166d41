"""The call: plan -> parts -> attached to the user's model, optimizer, loaders and schedulers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distributedtorch import apart, attach, behind, filling, guard, inspect, met, precision, recipes, report
from distributedtorch.core.batches import Rows
from distributedtorch.core.blocks import check_named
from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.core.plan import Plan, resolve, sources
from distributedtorch.core.step import Member
from distributedtorch.core.world import World, here
from distributedtorch.data.balance import Balance
from distributedtorch.data.cursor import Share
from distributedtorch.data.loader import Loader, divide
from distributedtorch.data.stream import Stream, serve_all_loaders
from distributedtorch.launch import fork, heap, reserve
from distributedtorch.launch.adopt import check as check_group
from distributedtorch.launch.adopt import switch_off_around, unwrapped
from distributedtorch.launch.place import find
from distributedtorch.launch.start import join_world
from distributedtorch.launch.supervise import restart
from distributedtorch.run import RUN
from distributedtorch.sync import batchnorm
from distributedtorch.sync.divided import fence
from distributedtorch.sync.sparse import tables
from distributedtorch.values import device
from distributedtorch.verify import record as verify_record


def distribute(
    *objects: Any,
    plan: str | Plan | None = None,
    workers: int | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> Any:
    """Distribute a training loop: give its models, optimizers, loaders and schedulers, and go on with what comes back.

    Args:
        *objects: Models, optimizers, loaders, schedulers, in any number and order.
        plan: How: a name ("ddp", "zero1", "zero2", "zero3"), words ("zero2,clip=1.0") or a `dt.Plan`. A later call
            without one goes on with that of the call before.
        workers: How many processes to start where none were started (`python train.py`).
        weights: A .safetensors file, or a folder with some, to fill the model from. A model on the meta device is
            filled from it, or by its modules' own initialisers, a module at a time: under zero3 no rank ever holds
            more than its share and one block.

    Returns:
        The same objects in the same order: models, optimizers and schedulers are the ones given, rewired in place;
        loaders yield this rank's rows of every batch. One object comes back alone, several as a tuple.

    Raises:
        PlanError: The plan cannot be read, contradicts itself or does not fit the number of processes.
        UsageError: An object cannot be distributed as given.
        LaunchError: The processes cannot be started, or do not fit together.
    """
    effective, origin = resolve(*sources(os.environ), plan or RUN.plan)
    effective = verify_record.plan_here(effective)
    place, own_group = find(), dist.is_initialized() and not here().joined
    if not here().joined or here().size + here().servers == 1:
        check_group(place)
    _start(verify_record.workers_here(workers), effective)
    world = here()
    objects = tuple(unwrapped(thing, place) for thing in objects)
    if own_group:
        switch_off_around([thing for thing in objects if isinstance(thing, nn.Module)])
    effective.check(world.size + world.servers * bool(effective.apart), world.local_size)
    given = inspect.sort(objects, known=[*RUN.models, *RUN.optimizers, *RUN.schedulers, *RUN.loaders])
    alone = world.size + world.servers == 1
    plain = alone and not effective.numerics().words and not verify_record.wanted()
    inspect.check(given, [*RUN.models, *given.models], RUN.optimizers, world.size, plain=plain)
    check_named([*RUN.models, *given.models], effective.block)
    precision.check(given.models, effective)
    fill = _filling(given, weights)
    if plain:
        reserve.keep(_devices(given), world.comm, 1)
        fill(world, "ddp")
        result = _attach_plain(objects, given, effective, world)
        report.line(effective, origin, world, [], batchnorms=0, workers=workers)
        _remember(effective, given)
        return result
    join_world()
    reserve.keep(_devices(given), world.comm, world.local_size)
    if effective.apart:
        apart.part(given, effective, world)
    if world.size > 1 and any(one.type == "cpu" for one in _devices(given)):
        heap.keep_freed()
    result, loaders = _attach(objects, given, effective, world, fill)
    synchronised = given.models if world.size > 1 and effective.begins_in_lockstep else []
    batchnorms = sum(map(batchnorm.count, synchronised))
    report.line(effective, origin, world, loaders, batchnorms=batchnorms, workers=workers)
    _remember(effective, given)
    return result


def launch(function: Callable[..., Any], *args: Any, workers: int, plan: str | Plan | None = None) -> Any:
    """Run `function(*args)` in `workers` processes, for notebooks and interactive Python (a script needs none of it).

    The present process is forked, so the function sees everything defined so far, and what it changes stays in its
    own process: train inside it, and return what is to be kept. It calls `dt.distribute` without `workers`. Linux
    only; before CUDA is used. Every rank computes on one thread.

    Args:
        function: What every rank runs.
        *args: Its arguments.
        workers: How many processes.
        plan: As in `dt.distribute`; goes before the plan given there.

    Returns:
        What rank 0 returned, where that is plain data: None, numbers, text, tensors (on the CPU), and lists, tuples
        and dicts of these. For anything else None, and a line that says so.

    Raises:
        RankError: A rank failed: the first one, with its traceback. The others have been ended.
        LaunchError: Nothing was started.
        PlanError: The plan cannot be read or does not fit.
    """
    if RUN.plan is not None:
        do = "restart the kernel, and call dt.distribute only inside the function"
        raise LaunchError(explain("dt.launch after dt.distribute in this process", "a process without a run", do))
    fork.refuse(workers)
    if plan is not None:
        Plan.of(plan).check(workers)
    return fork.launch(function, args, workers=workers, plan=None if plan is None else str(plan))


def release() -> None:
    """Let go of everything distributed so far: plain objects again, whole on every rank. A group call.

    Every rank keeps all parameters, all optimizer state and the gradients shown, no hook and no method of this library
    is left on them, and the random state is the one that the order of data has come to: a loop that goes on does in
    each process what one process would.
    """
    world = here()
    world.loop.settle()
    behind.carry_out_put_off()
    while world.undo:
        world.undo.pop()()
    world.loop.close()
    while RUN.restore:
        RUN.restore.pop()()
    if RUN.stream is not None:
        RUN.stream.hand_back()
    RUN.plan, RUN.stream, RUN.balance, RUN.unclaimed, RUN.fed = None, None, None, [], 0
    for kept in (RUN.models, RUN.optimizers, RUN.schedulers, RUN.loaders):
        kept.clear()


def _start(workers: int | None, plan: Plan) -> None:
    """Start `workers` processes where this one was started alone; a world that is there is joined as it is."""
    if workers is None or workers == here().size or find().launcher != "none":
        return
    if workers < 1:
        raise LaunchError(explain(f"workers={workers}", "1 or more", "give the number of processes to start"))
    if RUN.plan is not None:
        given = f"workers={workers} in a later call, but the first ran as one process"
        raise LaunchError(explain(given, "the number in the first call", f"put workers={workers} there"))
    plan.check(workers)
    restart(workers)


def _remember(plan: Plan, given: inspect.Given) -> None:
    RUN.plan = plan
    RUN.models += given.models
    RUN.optimizers += given.optimizers
    RUN.schedulers += given.schedulers


def _attach_plain(objects: tuple[Any, ...], given: inspect.Given, plan: Plan, world: World) -> Any:
    """One process: nothing is changed; steps and batches are counted, so that it can be saved and resumed."""
    behind.stand(world.loop)
    if RUN.plan is None:
        met.stand(world, _take)
    loaders = {id(loader): _divided(loader, plan, world) for loader in given.loaders}
    RUN.loaders += loaders.values()
    return _back([loaders.get(id(thing), thing) for thing in objects])


def _take(given: Optimizer, owners: list[Member]) -> None:
    """Take in an optimizer that was not given, in the place of those whose parameters it has. A group call."""
    world, plan, one = here(), RUN.plan, inspect.Given(optimizers=[given])
    assert plan is not None
    mine = {id(param) for param in met.params_of(given)}
    theirs = [known for known in RUN.optimizers if any(id(param) in mine for param in met.params_of(known))]
    others = [known for known in RUN.optimizers if known not in theirs]
    place = min((RUN.optimizers.index(known) for known in theirs), default=len(others))
    if world.size > 1 or world.loop.expects:
        inspect.check(one, RUN.models, others, world.size, plain=False)
        if world.size > 1:
            inspect.same_everywhere(one, [], plan, world.comm, RUN.models)
        touched = any(member.touched_since_step for member in owners)
        attach.let_go(owners, world)
        RUN.optimizers[:] = others
        _attach_parameters(one, plan, world, touched=touched)
        attach.hand_over([m for m in world.loop.members if m.sync.optimizer is given], touched=touched)
        report.say(world, f"{type(given).__name__}, not given to dt.distribute, is met: plan {plan} from here on")
    RUN.optimizers[:] = [*others[:place], given, *others[place:]]


def take_waiting() -> None:
    """Take in optimizers that were not given: state is to be put into them. A group call."""
    world, plan = here(), RUN.plan
    if plan is None or world.servers or not attach.left(RUN.models, RUN.optimizers):
        return
    found = met.waiting()
    if world.size > 1:
        inspect.same_everywhere(inspect.Given(optimizers=found), [], plan, world.comm, RUN.models)
    for one in found:
        _take(one, met.owners_of(one, world))


def _attach(
    objects: tuple[Any, ...], given: inspect.Given, plan: Plan, world: World, fill: Fill
) -> tuple[Any, list[Loader]]:
    loop, comm = world.loop, world.comm
    loop.batches.models += given.models
    behind.stand(loop)
    many = world.size > 1
    seeded = _follow_seed(world) if many else False
    loaders = {id(loader): _divided(loader, plan, world) for loader in given.loaders}
    if many:
        inspect.same_everywhere(given, list(loaders.values()), plan, comm, [*RUN.models, *given.models])
        if plan.replicas > 1:
            world.parts(plan.replicas)  # here, where all ranks come
        for model in given.models:
            attach.same_weights(model, comm)
            world.undo += batchnorm.synchronise(model, loop) if plan.begins_in_lockstep else []
    if plan.recompute:
        world.undo += attach.recompute(given.models, plan.block)
    if RUN.plan is None:
        guard.stand(plan, world)
        met.stand(world, _take)
    precision.attach(given.models, plan, world)
    early = plan.sync != "zero3" or not many
    if early:
        fill(world, plan.sync)
    _attach_parameters(given, plan, world)
    if not early:
        fill(world, plan.sync)
    for scheduler in [*given.schedulers, *attach.made()]:
        attach.scheduler(scheduler, world)
    if seeded:
        attach.own_randomness(world.rank)
        RUN.seed = torch.initial_seed()
    verify_record.attach(loop, given.models)
    if RUN.balance is not None:
        RUN.balance.meet()
    RUN.loaders += loaders.values()
    return _back([loaders.get(id(thing), thing) for thing in objects]), list(loaders.values())


def _attach_parameters(given: inspect.Given, plan: Plan, world: World, *, touched: bool = False) -> None:
    """Give every parameter a sync: those of optimizers, those of none, and frozen ones where the plan divides them.

    `touched`: gradients are there, of a backward that others have stood around.
    """
    models = [*RUN.models, *given.models]
    if world.size > 1 and plan.begins_in_lockstep and not plan.lockstep:
        attach.none_left(models, [*RUN.optimizers, *given.optimizers], plan)
    for optimizer in given.optimizers:
        attach.optimizer(optimizer, models, plan, world, recipes.sync)
    attach.rest(models, [*RUN.optimizers, *given.optimizers], plan, world, touched=touched)
    if world.size > 1 and plan.lockstep:
        if plan.sync == "zero3":
            attach.frozen(given.models, partial(recipes.divide_frozen, models=given.models, plan=plan, world=world))
        elif plan.share:
            attach.frozen(given.models, partial(recipes.keep_once, world=world))


def _devices(given: inspect.Given) -> set[torch.device]:
    """Where the models are, or will be."""
    found = {param.device for model in given.models for param in model.parameters()}
    return {device() if one.type == "meta" else one for one in found}


Fill = Callable[[World, str], None]


def _filling(given: inspect.Given, path: str | os.PathLike[str] | None) -> Fill:
    """Make ready models that have no values yet; the result gives them values when their memory is laid out."""
    weights = None if path is None else filling.files(path)
    models = [model for model in given.models if path is not None or filling.is_meta(model)]
    owned = {id(p) for optimizer in given.optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = owned - tables(models)
    for model in models:
        filling.check(model, weights)
        filling.place(model)

    def fill(world: World, sync: str) -> None:
        divided = sync == "zero3" and world.size > 1

        def settle() -> None:
            if divided:
                fence()
                world.comm.pool.let_go()

        for model in models:
            whole = [p for p in model.parameters() if not divided or (p.requires_grad and id(p) not in trained)]
            filling.allocate(whole)
            filling.fill(model, weights, world, settle)

    return fill


def _back(objects: list[Any]) -> Any:
    return objects[0] if len(objects) == 1 else tuple(objects)


def _follow_seed(world: World) -> bool:
    """The order of data comes from rank 0's random state: at first, and where the script has set a seed since."""
    anew = RUN.stream is None or RUN.seed != torch.initial_seed()
    state = world.comm.bytes_of_all("data order", Stream().state_bytes() if anew and world.rank == 0 else b"")[0]
    if not state:
        return False
    if RUN.stream is None:
        RUN.stream = Stream()
        RUN.restore += [serve_all_loaders(RUN.stream), _note_seeds()]
    RUN.stream.load_bytes(state)
    return True


def _note_seeds() -> Callable[[], None]:
    """Notice a seed that is set again to what it was. Result: undo."""
    original = torch.manual_seed

    def manual_seed(seed: Any) -> torch.Generator:
        RUN.seed = None
        return original(seed)

    torch.manual_seed = manual_seed
    return lambda: setattr(torch, "manual_seed", original)


def _balance(plan: Plan, world: World) -> Balance | None:
    """What keeps the division of rows, made where it is first needed."""
    if plan.balance is None or world.size == 1:
        return None
    if RUN.balance is None:
        RUN.balance = Balance(world.loop, static=plan.balance == "static", say=partial(report.say, world))
        world.undo.append(RUN.balance.close)
    return RUN.balance


def _divided(loader: Any, plan: Plan, world: World) -> Loader:
    balance = _balance(plan, world)

    def on_batch(share: Share, batch: Any) -> None:
        behind.feeds(next((k for k, known in enumerate(RUN.loaders) if known is divided), 0))
        if world.size == 1 and not world.loop.expects:
            return
        total = _length(divided)
        last = total is not None and divided.cursor.batch >= total
        rows = Rows(mine=share.rows, everywhere=share.rows_global, batch=share.batch, last=last, source=id(divided))
        world.loop.batches.arrived(rows, batch)
        verify_record.arrived(rows, batch)

    divided = divide(
        loader,
        rank=world.rank,
        world=world.size,
        stream=RUN.stream,
        on_batch=on_batch,
        before_batch=behind.come_round,
        at_end=behind.ends,
        batch=plan.batch,
        reverse=verify_record.reversed_rows(),
        division=None if balance is None else balance.division(),
    )
    if balance is not None:
        balance.add(divided)
    return divided


def divide_met(loader: Any) -> Loader:
    """Divide a loader that was not given but is met in the loop. A group call."""
    assert RUN.plan is not None
    world = here()
    divided = _divided(loader, RUN.plan, world)
    if world.size > 1:
        inspect.same_everywhere(inspect.Given(), [divided], RUN.plan, world.comm)
    if RUN.balance is not None:
        RUN.balance.meet()
    RUN.loaders.append(divided)
    if RUN.unclaimed:
        divided.place.load_state_dict(RUN.unclaimed.pop(0))
    report.met(divided, world)
    return divided


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
