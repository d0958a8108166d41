"""The call: plan -> parts -> attached to the user's model, optimizer, loaders and schedulers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distributedtorch import apart, attach, behind, filling, guard, inspect, met, precision, recipes, report
from distributedtorch.core.batches import Rows
from distributedtorch.core.blocks import check_named
from distributedtorch.core.errors import LaunchError, UsageError, explain
from distributedtorch.core.override import hooked
from distributedtorch.core.plan import Plan, resolve, sources
from distributedtorch.core.step import Member
from distributedtorch.core.world import World, here
from distributedtorch.data.balance import Balance
from distributedtorch.data.cursor import Share
from distributedtorch.data.cut import rows_first
from distributedtorch.data.loader import Loader, divide
from distributedtorch.data.stream import Stream
from distributedtorch.data.whole import watch_dims
from distributedtorch.feed import Feed, rows_of, see
from distributedtorch.launch import fork, heap, reserve
from distributedtorch.launch.adopt import check as check_group
from distributedtorch.launch.adopt import switch_off_around, unwrapped
from distributedtorch.launch.place import find
from distributedtorch.launch.start import join_world
from distributedtorch.launch.supervise import restart
from distributedtorch.pace import Pace
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
    batch_dim: int | Sequence[int] | None = None,
    batches: Literal["own"] | None = None,
) -> Any:
    """Distribute a training loop: give its models, optimizers, loaders and schedulers, and go on with what comes back.

    Args:
        *objects: Models, optimizers, loaders, schedulers, in any number and order.
        plan: How: a name ("ddp", "zero1", "zero2", "zero3"), words ("zero2,clip=1.0") or a `dt.Plan`. A later call
            without one goes on with that of the call before.
        workers: How many processes to start where none were started (`python train.py`). Each runs the command anew,
            and this one becomes their supervisor: what stands above the call runs once more than there are workers,
            and what is registered at exit is called before they start. `dtorch run --workers N` saves that.
        weights: A .safetensors file, or a folder with some, to fill the model from. A model on the meta device is
            filled from it, or by its modules' own initialisers, a module at a time: under zero3 no rank ever holds
            more than its share and one block.
        batch_dim: Which dimension of a batch's tensors has its rows, for loaders that only hand out whole batches
            (a list of batches, a class of your own): 1 where time is first (a tensor of one dimension has its rows in
            that), or one number for each tensor of a batch, in order. Without it, the first. A torch DataLoader needs
            none: its rows are divided before they are put together.
        batches: "own": no loader is divided, each rank trains on batches that it draws or reads by itself, of one size
            on all ranks. As many times the batch, and not the result of one process.

    Returns:
        The same objects in the same order: models, optimizers and schedulers are the ones given, rewired in place;
        loaders yield this rank's rows of every batch. One object comes back alone, several as a tuple.

    Raises:
        PlanError: The plan cannot be read, contradicts itself or does not fit the number of processes.
        UsageError: An object cannot be distributed as given.
        LaunchError: The processes cannot be started, or do not fit together.
    """
    dims = _dims(batch_dim)
    own_group = dist.is_initialized() and not here().joined
    effective, origin = enter(plan or RUN.plan, workers)
    world, place = here(), find()
    objects = tuple(unwrapped(thing, place) for thing in objects)
    if own_group:
        switch_off_around([thing for thing in objects if isinstance(thing, nn.Module)])
    effective.check(world.size + world.servers * bool(effective.apart), world.local_size)
    given = inspect.sort(objects, known=[*RUN.models, *RUN.optimizers, *RUN.schedulers, *RUN.loaders])
    _check_batches(batches, given)
    alone = world.size + world.servers == 1
    plain = alone and not effective.numerics().words and not verify_record.wanted()
    inspect.check(given, [*RUN.models, *given.models], RUN.optimizers, world.size, plain=plain)
    check_named([*RUN.models, *given.models], effective.block)
    precision.check(given.models, effective)
    fill = _filling(given, weights)
    if plain:
        reserve.keep(_devices(given), world.comm, 1)
        fill(world, "ddp")
        result = _attach_plain(objects, given, effective, world, dims)
        report.line(effective, origin, world, [], batchnorms=0, workers=workers)
        _remember(effective, given)
        return result
    join_world()
    reserve.keep(_devices(given), world.comm, world.local_size)
    if effective.apart:
        apart.part(given, effective, world)
    if world.size > 1 and any(one.type == "cpu" for one in _devices(given)):
        heap.keep_freed()
    result, loaders = _attach(objects, given, effective, world, fill, dims=dims)
    if world.size > 1:
        _look(given, effective, world, own=batches is not None)
    synchronised = given.models if world.size > 1 and effective.begins_in_lockstep else []
    batchnorms = sum(map(batchnorm.count, synchronised))
    report.line(effective, origin, world, loaders, batchnorms=batchnorms, workers=workers, own=batches is not None)
    _remember(effective, given)
    return result


def enter(plan: str | Plan | None, workers: int | None) -> tuple[Plan, dict[str, str]]:
    """The plan in force and where its words came from, in the processes that it asks for: they are started, if need be.

    Raises:
        PlanError: The plan cannot be read, or does not fit the number of processes to start.
        LaunchError: The processes cannot be started.
    """
    effective, origin = resolve(*sources(os.environ), plan)
    effective = verify_record.plan_here(effective)
    if not here().joined or here().size + here().servers == 1:
        check_group(find())
    _start(verify_record.workers_here(workers), effective)
    return effective, origin


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
    RUN.plan, RUN.stream, RUN.balance, RUN.feed, RUN.unclaimed, RUN.fed = None, None, None, None, [], 0
    RUN.pace = Pace()
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


def _dims(given: int | Sequence[int] | None) -> Dims:
    """The dimensions of rows, checked."""
    named = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if any(not isinstance(dim, int) or isinstance(dim, bool) or dim < 0 for dim in named):
        needed = "the number of a dimension, from 0, or one for each tensor of a batch"
        raise UsageError(explain(f"batch_dim={given!r}", needed, "batch_dim=1 where batches are (time, rows)"))
    return given if given is None or isinstance(given, int) else named


def _attach_plain(objects: tuple[Any, ...], given: inspect.Given, plan: Plan, world: World, dims: Dims) -> Any:
    """One process: nothing is changed; steps and batches are counted, so that it can be saved and resumed."""
    behind.stand(world.loop)
    if RUN.plan is None:
        met.stand(world, _take)
    loaders = {id(loader): _divided(loader, plan, world, dims) for loader in given.loaders}
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
    objects: tuple[Any, ...], given: inspect.Given, plan: Plan, world: World, fill: Fill, *, dims: Dims
) -> tuple[Any, list[Loader]]:
    loop, comm = world.loop, world.comm
    loop.batches.models += given.models
    behind.stand(loop)
    many = world.size > 1
    seeded = _follow_seed(world) if many else False
    RUN.restore += _feed().meet()
    loaders = {id(loader): _divided(loader, plan, world, dims) for loader in given.loaders}
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
    if many:
        _watch_dims(given, list(loaders.values()), world)
    return _back([loaders.get(id(thing), thing) for thing in objects]), list(loaders.values())


def _watch_dims(given: inspect.Given, new: list[Loader], world: World) -> None:
    """Look for sequences that are cut along time, where a loader and a model have come together."""
    loaders = new if not given.models else RUN.loaders
    sources = {id(loader) for loader in loaders if loader.guesses}

    def rows() -> Rows | None:
        used = world.loop.rows
        return used if used is not None and used.source in sources else None

    for model in [*RUN.models, *given.models] if sources else ():
        world.undo += watch_dims(model, rows)


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
Dims = int | tuple[int, ...] | None


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
        RUN.restore.append(_note_seeds())
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


def _divided(loader: Any, plan: Plan, world: World, dims: Dims = None) -> Loader:
    balance = _balance(plan, world)

    def on_batch(share: Share, batch: Any) -> None:
        behind.feeds(next((k for k, known in enumerate(RUN.loaders) if known is divided), 0))
        if world.size == 1 and not world.loop.expects:
            return
        rows = rows_of(share, divided, divided.cursor)
        world.loop.batches.arrived(rows, batch)
        verify_record.arrived(rows, rows_first(batch, dims or 0))

    def at_end() -> None:
        if not behind.STATE.ending.is_set():
            world.loop.batches.walked(id(divided))
            behind.ends()

    feed = _feed()
    divided = divide(
        loader,
        rank=world.rank,
        world=world.size,
        stream=RUN.stream,
        on_batch=on_batch,
        before_batch=behind.come_round,
        at_end=at_end,
        batch=plan.batch,
        reverse=verify_record.reversed_rows(),
        division=None if balance is None else balance.division(),
        batch_dim=dims,
        choose=feed.choose,
        making=feed.making,
    )
    if balance is not None:
        balance.add(divided)
    return divided


def _check_batches(batches: str | None, given: inspect.Given) -> None:
    """Refuse what `batches` cannot be, and a loader that would be divided under it."""
    if batches not in (None, "own"):
        do = "leave it out (batches are divided), or batches='own' (each rank draws its own)"
        raise UsageError(explain(f"batches={batches!r}", "None or 'own'", do))
    if batches is not None and given.loaders:
        said = f"batches='own' with a loader ({type(given.loaders[0]).__name__})"
        do = "leave the loader out of the call and iterate it as it is, or leave batches='own' out"
        raise UsageError(explain(said, "one of the two: a loader that is given is divided", do))


def _look(given: inspect.Given, plan: Plan, world: World, *, own: bool) -> None:
    """See what feeds the loop: loaders, batches drawn by hand, or each rank's own."""
    loop, feed = world.loop, _feed()
    if own:
        feed.own = loop.own_batches = True
    if plan.lockstep and (RUN.plan is None or loop.drawn is not None):
        loop.look(given.models)
        for model in given.models if feed.own else ():
            world.undo.append(hooked(model, model.register_forward_pre_hook(see, with_kwargs=True)))
    if feed.stepped not in loop.after_step:
        loop.after_step.append(feed.stepped)
        world.undo.append(partial(loop.after_step.remove, feed.stepped))


def _feed() -> Feed:
    """What feeds the loop of this run."""
    if RUN.feed is None:

        def divide_met(loader: Any) -> Loader:
            assert RUN.plan is not None
            return _divided(loader, RUN.plan, here())

        RUN.feed = Feed(divide_met)
    found: Feed = RUN.feed
    return found
