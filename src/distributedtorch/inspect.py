"""Looking at what was given to `distribute` before anything is changed: told apart, checked, compared between ranks."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import LaunchError, UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import accelerator, here
from distributedtorch.data.loader import Loader
from distributedtorch.sync import optimizers

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "_FabricModule")


@dataclass
class Given:
    """The objects of one call, by kind."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)


def sort(objects: Sequence[Any], known: Sequence[Any]) -> Given:
    """Tell objects apart by type; refuse what is none of the four, and anything given before."""
    given = Given()
    if not objects:
        raise UsageError(
            explain("dt.distribute()", "a model, optimizer, loader or scheduler", "pass what the loop uses")
        )
    seen = {id(thing) for thing in known}
    for position, thing in enumerate(objects):
        if id(thing) in seen:
            do = "pass each object once; use what the first call returned"
            raise UsageError(
                explain(f"the same {type(thing).__name__} twice (argument {position + 1})", "each once", do)
            )
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            given.models.append(thing)
        elif isinstance(thing, Optimizer):
            given.optimizers.append(thing)
        elif isinstance(thing, LRScheduler):
            given.schedulers.append(thing)
        elif hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, dict, torch.Tensor)):
            _refuse_no_loader(thing, position)
            given.loaders.append(thing)
        else:
            needed = "models, optimizers, loaders and schedulers"
            do = "pass only those; schedulers must be torch.optim.lr_scheduler.LRScheduler"
            raise UsageError(explain(f"argument {position + 1} is a {type(thing).__name__}", needed, do))
    return given


_NOT_BATCHES = (nn.Module, Optimizer, LRScheduler, nn.Parameter, DataLoader, Loader)


def _refuse_no_loader(thing: Any, position: int) -> None:
    """Refuse what can be walked over but yields no batches: a list of optimizers, `model.parameters()`."""
    listed = thing if type(thing) in (list, tuple) else ()
    inside = next((one for one in listed if isinstance(one, _NOT_BATCHES)), None)
    if inside is not None:
        said = f"argument {position + 1} is a {type(thing).__name__} with a {type(inside).__name__} in it"
        do = "pass its elements one by one: dt.distribute(model, *optimizers, *loaders)"
        raise UsageError(explain(said, "models, optimizers, loaders and schedulers", do))
    if getattr(thing, "__qualname__", "").startswith("Module."):
        said = f"argument {position + 1} is a generator ({thing.__qualname__})"
        do = "pass the model, and the optimizer made of its parameters"
        raise UsageError(explain(said, "models, optimizers, loaders and schedulers", do))


def check(given: Given, models: Sequence[nn.Module], earlier: Sequence[Optimizer], world: int, *, plain: bool) -> None:
    """Refuse what cannot be distributed, as soon as it can be known. `plain`: one process, and nothing to do in it."""
    for model in given.models:
        _check_model(model, world)
    known = {id(p): name for model in models for name, p in model.named_parameters()}
    taken = {id(p): type(o).__name__ for o in earlier for group in o.param_groups for p in group["params"]}
    for optimizer in given.optimizers:
        if not plain:
            optimizers.refuse(optimizer)
        _check_optimizer(optimizer, known, taken)
        if any(isinstance(v, torch.Tensor) and v.is_meta for state in optimizer.state.values() for v in state.values()):
            given_text = f"{type(optimizer).__name__} has made state on the meta device: it has no values"
            do = "use an optimizer that makes its state at the first step (AdamW, SGD), or build the model on cpu"
            raise UsageError(explain(given_text, "optimizer state with values", do))


def _check_model(model: nn.Module, world: int) -> None:
    kind = type(model).__name__
    if kind in WRAPPERS or hasattr(model, "_fsdp_state") or "FSDP" in kind:
        do = "pass the plain model: dt.distribute does what the wrapper does"
        raise UsageError(explain(f"the model is wrapped in {kind}", "a plain nn.Module", do))
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        do = "run one batch through the model before dt.distribute and before the optimizer is made"
        raise UsageError(explain(f"parameter {lazy!r} has no size yet (nn.LazyLinear or its like)", "known sizes", do))
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        do = "model.to(one device) before dt.distribute"
        raise UsageError(explain(f"the model's parameters are on {' and '.join(devices)}", "one device per rank", do))
    first = next(model.parameters(), None)
    if world > 1 and first is not None and first.device.type == accelerator() != "cpu":
        check_index(first.device, torch.accelerator.current_device_index())
    _check_training(model, world)


def check_index(device: torch.device, own: int) -> None:
    """Refuse a model on another rank's accelerator."""
    if device.index != own:
        given = f"the model is on {device}, and this rank's own is {device.type}:{own}"
        do = f'model.to("{device.type}") without a number, or model.to(dt.device())'
        raise UsageError(explain(given, "every rank's model on its own accelerator", do))


def _check_training(model: nn.Module, world: int) -> None:
    began = [name for name, p in model.named_parameters() if p.grad is not None]
    if began:
        do = "call dt.distribute before the first backward, or model.zero_grad(set_to_none=True) just before it"
        raise UsageError(explain(f"parameter {began[0]!r} has a gradient already", "a model before training", do))
    if world == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_table(name, module)
    ours = {id(p) for member in here().loop.members for p in member.sync.params} if here().joined else set()
    for name, param in model.named_parameters():
        if id(param) in ours:
            do = "give models that share parameters in one call of dt.distribute"
            raise UsageError(explain(f"parameter {name!r} is distributed already, in another model", "each once", do))
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            do = "edit p.grad between backward() and step(), where it is the global gradient"
            needed = "no hook on parameters: with several ranks it would see this rank's gradient only"
            raise UsageError(explain(f"parameter {name!r} has a gradient hook", needed, do))


def _check_table(name: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
    if table.max_norm is not None:
        given = f"module {name!r} shortens its rows in its forward (max_norm={table.max_norm})"
        do = "max_norm=None, and after optimizer.step() on all ranks: weight.data.copy_(weight.data.renorm(2, 0, norm))"
        raise UsageError(explain(given, "forwards that leave parameters alone: each rank sees other rows", do))
    if table.scale_grad_by_freq:
        given = f"module {name!r} divides gradients by how often a row is in the batch (scale_grad_by_freq)"
        needed = "a gradient that is a sum over samples: a rank knows its own rows of the batch only"
        raise UsageError(explain(given, needed, "scale_grad_by_freq=False"))


def _check_optimizer(optimizer: Optimizer, known: dict[int, str], taken: dict[int, str]) -> None:
    kind = type(optimizer).__name__
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [tuple(p.shape) for p in mine if id(p) not in known]
    if strange:
        do = "pass every module whose parameters the optimizer has, and make the optimizer after model.to(...)"
        given = f"{len(strange)} of {len(mine)} parameters of {kind} are in no model given (shapes {strange[:3]}...)"
        raise UsageError(explain(given, "optimizers over the models' own parameters", do))
    for param in mine:
        if id(param) in taken:
            do = "give each parameter to one optimizer; one for a later phase is met at its first step, not given"
            given = f"parameter {known[id(param)]!r} is in two optimizers ({taken[id(param)]} and {kind})"
            raise UsageError(explain(given, "one optimizer per parameter", do))
        taken[id(param)] = kind


def same_everywhere(
    given: Given, loaders: Sequence[Loader], plan: Plan, comm: Comm, models: Sequence[nn.Module] = ()
) -> None:
    """Compare what all ranks were given; show the difference where there is one. `models`: all so far."""
    mine = fingerprint(given, loaders, plan, models or given.models)
    cards = [json.loads(card) for card in comm.bytes_of_all("fingerprint", json.dumps(mine).encode())]
    for rank, card in enumerate(cards):
        if card != cards[0]:
            keys = [key for key in {**cards[0], **card} if cards[0].get(key) != card.get(key)]
            shown = "\n".join(
                f"    {key}: rank 0 {cards[0].get(key, 'has none')}, rank {rank} {card.get(key, 'has none')}"
                for key in keys[:8]
            )
            more = f"\n    and {len(keys) - 8} more" if len(keys) > 8 else ""
            given_text = f"rank 0 and rank {rank} were given different things:\n{shown}{more}"
            do = "run the same script with the same arguments, data and versions on every rank"
            if all(key.endswith(" samples") for key in keys):
                do = (
                    "draw splits and made-up data from a seed, say torch.manual_seed(0) at the top of the script, and "
                    "leave rank and world size out of the dataset: rows are divided here"
                )
            raise LaunchError(explain(given_text, "the same model, optimizer, data and plan on all ranks", do))
        orders = [[key for key in one if key.startswith("model ")] for one in (cards[0], card)]
        if orders[0] != orders[1]:
            raise LaunchError(_another_order(rank, *orders))


def _another_order(rank: int, first: list[str], other: list[str]) -> str:
    there, here_ = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    given = f"rank 0 has {there!r} where rank {rank} has {here_!r}: modules are registered in another order there"
    do = "build modules in the order of a list or of sorted(...), not of a set"
    return explain(given, "one order of modules on all ranks", do)


def fingerprint(given: Given, loaders: Sequence[Loader], plan: Plan, models: Sequence[nn.Module]) -> dict[str, Any]:
    """What must be equal on all ranks, as plain data: of an optimizer's groups who is in which, in whatever order."""
    names = {id(p): f"model {m} {name}" for m, model in enumerate(models) for name, p in model.named_parameters()}
    card: dict[str, Any] = {"plan": str(plan), "torch": torch.__version__, "script": _script()}
    for m, model in enumerate(given.models):
        tensors: Iterable[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in tensors:
            trained = ", trained" if tensor.requires_grad else ""
            card[f"model {m} {name}"] = f"{tuple(tensor.shape)} {tensor.dtype}{trained}"
    for o, optimizer in enumerate(given.optimizers):
        for g, group in enumerate(optimizer.param_groups):
            rest = {key: str(value) for key, value in group.items() if key not in ("params", "param_names")}
            card[f"optimizer {o} {type(optimizer).__name__} group {g}"] = f"{len(group['params'])} parameters {rest}"
            mine = sorted(names.get(id(param), "a stranger") for param in group["params"])
            card |= {f"optimizer {o} {name}": f"group {g}" for name in mine}
    for number, loader in enumerate(loaders):
        for key, value in loader.fingerprint().items():
            card[f"loader {number} {key}"] = value
    return card


def _script() -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and Path(path).is_file() else "none"
