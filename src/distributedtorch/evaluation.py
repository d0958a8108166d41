"""Evaluation: every sample exactly once over all ranks, and the figures of one process.

Each global batch of the loader is divided by rows, as in training; a rank without rows runs the model on a repeated one
that counts for nothing. The figures' sums and states travel once, at the end. Nothing is left behind: the modes of all
modules, the order of data and the position of loaders are as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from distributedtorch import report
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.world import World, here
from distributedtorch.data.cursor import Share
from distributedtorch.data.loader import Loader, divide
from distributedtorch.data.stream import Stream
from distributedtorch.data.survey import samplers
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN
from distributedtorch.score import choice
from distributedtorch.score.batch import Step, forward, pair
from distributedtorch.score.figure import Every, Figure, Measure, checked
from distributedtorch.score.parcel import gather, join, split
from distributedtorch.sync.loose import Loose
from distributedtorch.sync.served import Served

Choose = Callable[[Any, Any], dict[str, Figure]]
"""The figures to report, from the first batch's output and target."""


def evaluate(model: nn.Module, loader: Any, metrics: Any = None, *, step: Step | None = None) -> dict[str, Any]:
    """Evaluate a model over a loader: each sample counts once, the result is that of one process on every rank.

    The model runs in eval mode without gradients; the mode of every module is put back, and neither the order nor the
    position of any loader moves. All ranks must call it.

    Args:
        model: The model, distributed or not.
        loader: A plain loader, which is divided for this call, or one that `dt.distribute` returned.
        metrics: A dict from names to metrics, each a `torchmetrics.Metric` (copied, so it stays as it is) or a function
            `(output, target) -> one value per sample`, of which the mean is reported. A `MetricCollection` is taken
            too. Without it: loss and accuracy for class scores, the squared error for tensors of one shape.
        step: `step(model, batch) -> (output, target)`, where batches are neither `(input, target)` nor a dict with
            labels for `model(**batch)`.

    Returns:
        Each metric's value by name: a number, or a tensor (on the host) where it has several.

    Raises:
        UsageError: The loader has no batches, or something given cannot be evaluated or combined exactly.
        DesyncError: The ranks evaluate different things.
    """
    if metrics is None:
        return _run(model, loader, choice.suggested, step, [])
    asked = choice.figures(metrics)
    return _run(model, loader, lambda output, target: asked, step, list(asked))


def accuracy(model: nn.Module, loader: Any, *, step: Step | None = None) -> float:
    """The share of samples whose highest class score is the target's, each sample counted once; see `evaluate`.

    Args:
        model: The model: its output is class scores `(n, classes, ...)` for targets `(n, ...)`.
        loader: As in `evaluate`.
        step: As in `evaluate`.
    """
    return float(_run(model, loader, choice.top_1, step, ["accuracy"])["accuracy"])


def scores(model: nn.Module, loader: Any, measure: Measure, *, step: Step | None = None) -> Tensor:
    """Every sample's score, the same on all ranks, in the order in which one process would see the samples.

    Two models over one loader give pairs for `dt.compare`, also where the loader shuffles: evaluation does not move
    the order.

    Args:
        model: The model.
        loader: As in `evaluate`.
        measure: `(output, target) -> one value per sample`.
        step: As in `evaluate`.
    """
    every = Every("score", checked("score", measure))
    found = _run(model, loader, lambda output, target: {"score": every}, step, ["score"])["score"]
    return torch.as_tensor(found)


def _run(model: nn.Module, loader: Any, choose: Choose, step: Step | None, names: list[str]) -> dict[str, Any]:
    world = join_world()
    _check_model(model, world.size)
    _note_replicas(model, world)
    figures: dict[str, Figure] = {}
    batches = 0
    with _unmoved(loader, world) as (divided, shares), _evaluating(model), torch.no_grad():
        _same_everywhere(_card(model, divided, names), world.comm)
        for batch in divided:
            share = shares.pop()
            if share.rows_global == 0:
                continue
            batches += 1
            output, target = pair(step or forward, model, batch)
            figures = figures or choose(output, target)
            for figure in figures.values() if not share.idle else ():
                figure.update(share.batch, output, target)
    if not figures:
        given = f"a loader without batches ({type(loader).__name__})"
        raise UsageError(explain(given, "at least one sample", "look at its length, drop_last and batch_size"))
    return _combined(figures, batches, world.comm)


def _combined(figures: dict[str, Figure], batches: int, comm: Comm) -> dict[str, Any]:
    mine = join([figure.parcel() for figure in figures.values()], batches=batches)
    parcels = gather(comm, "evaluate", mine)
    walked = [parcel.card["batches"] for parcel in parcels]
    if min(walked) != max(walked):
        said = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(walked))
        do = "give every rank the same data; a stream must yield the same samples everywhere"
        raise DesyncError(explain(f"the ranks evaluated different numbers of batches ({said})", "one number", do))
    results = zip(figures.items(), split(parcels), strict=True)
    return {name: tree_map(_plain, figure.result(parts)) for (name, figure), parts in results}


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if value.ndim else value.item()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards for each module the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # as a call, because models may do more in it than set the flag
        for module, training in modes:
            module.training = training


@contextmanager
def _unmoved(loader: Any, world: World) -> Iterator[tuple[Loader, list[Share]]]:
    """The loader divided for one walk, with the share of each batch; the random states behind its order put back."""
    user, batch, dims = loader, None, None
    if isinstance(loader, Loader):
        user, batch, dims = loader._loader, loader._changed.get("batch_size"), loader.batch_dim
        if isinstance(user, Iterator):
            given = f"a distributed loader over an iterator ({type(user).__name__})"
            raise UsageError(explain(given, "data that can be walked again", "evaluate over a DataLoader or a list"))
    owners = [user, *samplers(user)]
    generators = [g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)]
    stood = [(generator, generator.get_state()) for generator in generators]
    stream = RUN.stream or _own_stream(world)
    before, shares = stream.state_bytes(), list[Share]()
    try:
        take = lambda share, _: shares.append(share)  # noqa: E731
        ranks: dict[str, Any] = {"rank": world.rank, "world": world.size, "batch_dim": dims}
        yield divide(user, stream=stream, on_batch=take, batch=batch, **ranks), shares
    finally:
        stream.load_bytes(before)
        for generator, state in stood:
            generator.set_state(state)


def _own_stream(world: World) -> Stream:
    """The order of data where nothing was distributed: rank 0's random state."""
    stream = Stream()
    if world.size > 1:
        states = world.comm.bytes_of_all("evaluation order", stream.state_bytes() if world.rank == 0 else b"")
        stream.load_bytes(states[0])
    return stream


def _check_model(model: Any, world: int) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(explain(f"a {type(model).__name__} as model", "an nn.Module", "pass the model itself"))
    for name, module in model.named_modules():
        if world > 1 and isinstance(module, _BatchNorm) and module.running_mean is None:
            given = f"module {name!r} normalises with the present batch also in eval mode (track_running_stats=False)"
            raise UsageError(explain(given, "outputs that depend on one sample each", "keep running statistics"))


def _note_replicas(model: nn.Module, world: World) -> None:
    """Say once that replicas which step alone are scored as they are."""
    mine = {id(param) for param in model.parameters()}
    for sync in [member.sync for member in world.loop.members if isinstance(member.sync, Loose | Served)]:
        if sync.differ and not sync.told and any(id(p) in mine for p in sync.params):
            sync.told = True
            said = "each rank's rows are scored by its own replica, and replicas differ now"
            report.say(world, f"evaluation: {said}; call dt.sync() first to score what they stand for together")


def _card(model: nn.Module, loader: Loader, names: list[str]) -> dict[str, Any]:
    """What must be equal on all ranks: the data, the metrics, and weights that no `distribute` keeps equal."""
    card: dict[str, Any] = {f"loader {key}": value for key, value in loader.fingerprint().items()}
    card["metrics"] = names
    if here().size > 1:
        kept = {id(tensor) for known in RUN.models for tensor in [*known.parameters(), *known.buffers()]}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if id(tensor) not in kept:
                wide = tensor.detach().double()
                card[f"sums of {name}"] = [float(wide.sum()).hex(), float(wide.abs().sum()).hex()]
    return card


def _same_everywhere(mine: dict[str, Any], comm: Comm) -> None:
    if comm.world == 1:
        return
    cards = [json.loads(card) for card in comm.bytes_of_all("evaluation", json.dumps(mine).encode())]
    for rank, card in enumerate(cards):
        wrong = [key for key in {**cards[0], **card} if cards[0].get(key) != card.get(key)]
        if wrong:
            key = wrong[0]
            said = f"{key}: rank 0 {cards[0].get(key, 'has none')}, rank {rank} {card.get(key, 'has none')}"
            do = "build model, data and metrics alike on every rank; dt.distribute(model) gives all rank 0's weights"
            raise DesyncError(explain(f"the ranks evaluate different things: {said}", "the same on all ranks", do))
