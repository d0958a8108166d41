"""What another library's checkpoint holds, in our words: tensors by name, optimizer state by parameter, steps taken.

`split` finds the parts of a nested state by the names that people give them; `content` is what a checkpoint of ours is
written from. An optimizer's state that is numbered and not named is matched to parameters by their order in the model's
state, and refused where the order does not say all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint.foreign import Room, wrong
from distributedtorch.checkpoint.names import Record
from distributedtorch.checkpoint.plain import Packer
from distributedtorch.checkpoint.writing import Content, Piece
from distributedtorch.core.errors import CheckpointError, explain

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "module", "net")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optimizer_states", "opt")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers")
_STEP = ("step", "global_step", "global_steps", "steps", "iteration", "iter_num", "iter")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WRAPPERS = ("module.", "_orig_mod.")
_BEFORE = re.compile(r"(?:module\.)*")
_MOST_STEPS = 10**15 - 1
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)
WEIGHTS_ONLY = "convert the weights alone with --no-optimizer"


@dataclass(kw_only=True)
class Group:
    """An optimizer's group."""

    params: list[str]
    options: dict[str, Any]


@dataclass(kw_only=True)
class Portable:
    """A checkpoint's content."""

    found: str
    """What it was, in words."""
    model: dict[str, Any]
    """Tensors by name; tied ones are one tensor."""
    groups: list[Group] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's, by parameter."""
    scheduler: dict[str, Any] | None = None
    step: int = 0
    notes: list[str] = field(default_factory=list)
    """What the user should know about it."""
    room: Room = field(default_factory=Room)
    """What may still be made of the files."""


def split(nested: Any, found: str, *, optimizer: bool = True, room: Room | None = None) -> Portable:
    """Find model, optimizer, scheduler and step in what a file held.

    Raises:
        CheckpointError: No model in it, or parts that do not fit together.
    """
    try:
        made = _split(nested, found, optimizer=optimizer)
        made.room = room or made.room
        return made
    except CheckpointError:
        raise
    except _WRONG as error:
        raise wrong(f"{found} does not fit together ({type(error).__name__}: {str(error)[:200]})") from None


def _split(nested: Any, found: str, *, optimizer: bool) -> Portable:
    nested = _unwrapped(nested)
    if not isinstance(nested, dict) or not nested:
        raise _no_model(found, nested)
    if any(isinstance(value, Tensor) and type(name) is str for name, value in nested.items()):
        parts = {"model": nested}
    else:
        parts = dict(nested)
    key = next((key for key in _MODEL if _is_state(parts.get(key))), None)
    if key is None:
        raise _no_model(found, nested)
    made = Portable(found=found, model=plain_names(parts.pop(key)))
    said = sorted({wrapper for wrapper in _WRAPPERS for name in nested.get(key, nested) if wrapper in name})
    made.notes += [f"prefix {wrapper!r} of a wrapper removed from the names" for wrapper in said]
    step = _first(parts, _STEP)
    made.step = step if type(step) is int and 0 <= step <= _MOST_STEPS else 0
    theirs = _only(_first(parts, _OPTIMIZER))
    if optimizer and theirs is not None:
        take_optimizer(made, theirs)
    scheduler = _only(_first(parts, _SCHEDULER))
    if optimizer and isinstance(scheduler, dict) and "last_epoch" in scheduler:
        made.scheduler = _scheduler(scheduler)
    if parts:
        made.notes.append(f"left out: {', '.join(map(str, parts))}"[:300])
    return made


def _scheduler(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state; DCP makes text of the numbers that count milestones."""
    milestones = state.get("milestones")
    if isinstance(milestones, dict) and all(str(key).isdigit() for key in milestones):
        return {**state, "milestones": Counter({int(key): value for key, value in milestones.items()})}
    return state


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state without the prefixes of wrappers, and without records."""
    made: dict[str, Any] = {}
    for name, value in state.items():
        short = plain_name(name)
        if short in made:
            raise CheckpointError(explain(f"the names {name!r} and {short!r}", "names that differ", "rename one"))
        if not isinstance(value, Record):
            made[short] = value
    return made


def plain_name(name: str) -> str:
    """A parameter's name in the model itself: DistributedDataParallel and torch.compile put theirs before or inside."""
    return _BEFORE.sub("", name, count=1).replace(_WRAPPERS[1], "")


def take_optimizer(made: Portable, theirs: Any) -> None:
    """Add an optimizer's state: by the names it has, or by its numbers."""
    theirs = _unflattened(made, theirs)
    if not isinstance(theirs, dict) or not isinstance(theirs.get("state"), dict) or "param_groups" not in theirs:
        given = f"{made.found}: an optimizer's state without 'state' and 'param_groups'"
        raise CheckpointError(explain(given, "what optimizer.state_dict() gives, of one optimizer", WEIGHTS_ONLY))
    groups = [dict(group) for group in theirs["param_groups"]]
    numbers = [list(group.pop("params")) for group in groups]
    written = [group.pop("param_names", None) for group in groups]
    state = {int(key) if isinstance(key, str) and key.isdigit() else key: one for key, one in theirs["state"].items()}
    if all(some is not None for some in written):
        names = [[plain_name(name) for name in some] for some in written]
    elif all(isinstance(one, str) and not one.isdigit() for some in numbers for one in some):
        names = [[plain_name(name) for name in some] for some in numbers]
    else:
        names = _by_order(made, numbers, state)
    named = dict(zip(_flat(numbers), _flat(names), strict=True))
    made.groups = [Group(params=some, options=group) for some, group in zip(names, groups, strict=True)]
    made.state = {named[key]: dict(values) for key, values in state.items() if key in named}
    check_state(made)
    steps = [int(values["step"]) for values in made.state.values() if "step" in values]
    made.step = max(steps, default=made.step)
    if not 0 <= made.step <= _MOST_STEPS:
        raise ValueError(f"{made.step} steps")


def _unflattened(made: Portable, theirs: Any) -> Any:
    """An optimizer's state by name where DCP wrote it flat, as `state.<parameter>.<key>`."""
    if not isinstance(theirs, dict) or not all(str(name).startswith(("state.", "param_groups.")) for name in theirs):
        return theirs
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for flat, value in theirs.items():
        part, _, rest = flat.partition(".")
        name, _, key = rest.rpartition(".")
        parts[part].setdefault(plain_name(name), {})[key] = value
    found: dict[Any, dict[str, Any]] = {}
    for name in [name for name in made.model if name in parts["param_groups"]]:
        options = parts["param_groups"][name]
        same = tuple(sorted((key, _said(value)) for key, value in options.items() if key != "params"))
        found.setdefault(same, {**options, "params": []})["params"].append(name)
    groups = list(found.values())
    made.notes.append(
        f"the optimizer's parameters grouped by their options: {len(groups)} groups, in the model's order"
    )
    return {"state": parts["state"], "param_groups": groups}


def _said(option: Any) -> str:
    """An option in words that are those of another one where both are equal."""
    return f"{option.dtype} {option.tolist()}" if isinstance(option, Tensor) else repr(option)


def check_state(made: Portable) -> None:
    """Refuse optimizer state that cannot be of its parameters."""
    for name in [name for group in made.groups for name in group.params]:
        param = made.model.get(name)
        if not isinstance(param, Tensor):
            given = f"{made.found}: the optimizer has {name!r}, which the model has not"
            raise CheckpointError(explain(given, "the state of one model and its optimizer", WEIGHTS_ONLY))
        for key, value in made.state.get(name, {}).items():
            if isinstance(value, Tensor) and key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                _same_shape(made, name, key, tuple(param.shape), tuple(value.shape))


def _same_shape(made: Portable, name: str, key: str, have: tuple[int, ...], found: tuple[int, ...]) -> None:
    if have != found:
        given = f"{made.found}: {key} of {name!r} is {found}, the parameter is {have}"
        raise CheckpointError(explain(given, "an optimizer over the model's parameters in their order", WEIGHTS_ONLY))


def _by_order(made: Portable, numbers: Sequence[Sequence[Any]], state: Mapping[Any, Any]) -> list[list[str]]:
    """Names for an optimizer's numbers: parameters in the order of the model's state, buffers left out."""
    names = _trainable(made.model)
    if len(names) != len(_flat(numbers)):
        given = (
            f"{made.found}: the optimizer numbers {len(_flat(numbers))} parameters, the model's state has {len(names)}"
        )
        do = f"save with optimizer(model.named_parameters()), which keeps the names, or {WEIGHTS_ONLY}"
        raise CheckpointError(explain(given, "as many, to match them by their order", do))
    made.notes.append(f"the optimizer's {len(names)} numbers matched to parameters by their order in the model's state")
    if len(numbers) == 1:
        return [names]
    return _by_shape(made, numbers, state, names)


def _by_shape(
    made: Portable, numbers: Sequence[Sequence[Any]], state: Mapping[Any, Any], names: Sequence[str]
) -> list[list[str]]:
    """Several groups: certain where all parameters of one shape are in one group, in the model's order."""
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        waiting.setdefault(tuple(made.model[name].shape), []).append(name)
    shapes = [[_shape(state.get(number, {})) for number in group] for group in numbers]
    homes = Counter(shape for group in shapes for shape in set(group))
    needed = Counter(_flat(shapes))
    if None in needed or max(homes.values(), default=0) > 1 or needed != {s: len(n) for s, n in waiting.items()}:
        given = f"{made.found}: {len(numbers)} groups of numbered parameters, and shapes do not tell which is which"
        do = f"save with named parameters in the groups, which keeps the names, or {WEIGHTS_ONLY}"
        raise CheckpointError(explain(given, "an order that says which parameter is in which group", do))
    next_of = {shape: iter(some) for shape, some in waiting.items()}
    return [[next(next_of[shape]) for shape in group if shape is not None] for group in shapes]


def _shape(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = [tuple(value.shape) for value in values.values() if isinstance(value, Tensor) and value.dim()]
    return shapes[0] if shapes else None


def _trainable(model: Mapping[str, Any]) -> list[str]:
    """Names of what can be parameters; tied ones under the first."""
    found: dict[tuple[Any, ...], str] = {}
    for number, (name, value) in enumerate(model.items()):
        if not isinstance(value, Tensor) or name.rpartition(".")[2] in _BUFFERS:
            continue
        if value.is_floating_point() or value.is_complex():
            same = (value.data_ptr(), value.shape, value.stride(), 0 if value.numel() else number)
            found.setdefault(same, name)
    return list(found.values())


def _unwrapped(nested: Any) -> Any:
    """What lies in a dict of one name, such as {"app": {...}}."""
    while isinstance(nested, dict) and len(nested) == 1:
        (inside,) = nested.values()
        if not isinstance(inside, dict) or next(iter(nested)) in _MODEL:
            break
        nested = inside
    return nested


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and all(type(n) is str for n in value) and any(map(torch.is_tensor, value.values()))


def _first(parts: dict[str, Any], keys: Sequence[str]) -> Any:
    found = [parts.pop(key) for key in keys if key in parts]
    return next((value for value in found if value is not None), None)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value or None


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for group in groups for one in group]


def _no_model(found: str, nested: Any) -> CheckpointError:
    has = f"a dict of {', '.join(map(str, list(nested)[:8])) or 'nothing'}" if isinstance(nested, dict) else "no dict"
    needed = f"a model's state_dict, alone or under one of {', '.join(_MODEL)}"
    return CheckpointError(explain(f"{found} holds {has}", needed, "save model.state_dict() under such a name"))


# As a checkpoint of ours.


def bound(made: Portable) -> None:
    """See that what is to be written is not far more than the files hold.

    Raises:
        CheckpointError: It is: tensors that are expanded, or lie over each other.
    """
    parts = [made.model, made.state, made.scheduler, [group.options for group in made.groups]]
    tensors = {(t.data_ptr(), t.dtype, t.shape, t.stride()): t for part in parts for t in _tensors(part)}
    try:
        made.room.hold_tensors(sum(t.numel() * t.element_size() for t in tensors.values()))
    except ValueError as error:
        raise wrong(f"{made.found} says {error}") from None


def _tensors(value: Any) -> Iterator[Tensor]:
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, dict | list | tuple):
            todo += one.values() if isinstance(one, dict) else one


def content(made: Portable) -> Content:
    """What the one process of a conversion writes.

    Raises:
        CheckpointError: It cannot be written, or is far more than the files hold.
    """
    bound(made)
    try:
        return _content(made)
    except CheckpointError:
        raise
    except _WRONG as error:
        raise wrong(f"{made.found} cannot be written ({type(error).__name__}: {str(error)[:200]})") from None


def _content(made: Portable) -> Content:
    versions = {"distributedtorch": version("distributedtorch"), "torch": torch.__version__}
    written = Content(head={"versions": versions, "plan": "imported", "world": 1, "step": made.step})
    spend = made.room.hold
    model = _packed(written, "model.0/", made.model, spend, "model")
    keys = {name: said["$tensor"] for name, said in model.items() if isinstance(said, dict) and "$tensor" in said}
    written.run = {"models": [{"kind": made.found, "state": model}], "optimizers": [], "schedulers": []}
    if made.groups:
        written.run["optimizers"] = [_optimizer(written, made, keys)]
    if made.scheduler is not None:
        written.run["schedulers"] = [{"kind": None, "state": _packed(written, "scheduler.0/", made.scheduler, spend)}]
    written.run |= {"user": {}, "loaders": [], "loss scale": None, "order": None}
    return written


def _optimizer(written: Content, made: Portable, keys: Mapping[str, str]) -> dict[str, Any]:
    groups = [
        {
            "params": [keys[name] for name in group.params],
            "options": _packed(written, f"optimizer.0/groups/{number}/", group.options, made.room.hold),
        }
        for number, group in enumerate(made.groups)
    ]
    state = {
        keys[name]: _packed(written, f"optimizer.0/{keys[name]}/", values, made.room.hold)
        for name, values in made.state.items()
        if values
    }
    return {"kind": None, "groups": groups, "state": state}


def _packed(
    written: Content, prefix: str, value: Mapping[str, Any], spend: Callable[[int], None], file: str = "state"
) -> dict[str, Any]:
    packer = Packer(prefix.rstrip("/"), prefix, spend=spend)
    packed: dict[str, Any] = packer.pack(dict(value))
    for key, tensor in packer.tensors.items():
        shape = tuple(tensor.shape)
        written.pieces.append(
            Piece(key=key, file=file, shape=shape, stride=None, low=0, high=tensor.numel(), tensor=tensor)
        )
    return packed
