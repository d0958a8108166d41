"""Whether a run can take over what a checkpoint says of it: forms, ranges and sizes, seen before anything is changed.

A hash says that nothing has changed since it was written, not that `dt.save` wrote it. Here everything is looked at
that loading relies on, down to random states (tried on generators of their own), torch's schedulers (tried on copies)
and optimizers (tried without values). Only objects of the user's own classes know what they take back.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distributedtorch.checkpoint.index import Entry, named
from distributedtorch.checkpoint.plain import unpack
from distributedtorch.contents import own_way
from distributedtorch.data.loader import Loader
from distributedtorch.data.stream import State, from_plain

_MOST = (1 << 63) - 1
_MOST_STEPS = 10**15 - 1
"""What a checkpoint's name has room for."""
_TIMES, _BESIDE = 4, 64 << 20
"""State outside of models may name tensors of so many times the bytes that are stored, and so many bytes beside."""
_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "sum", "acc_delta", "prev", "ax"),
}
"""State of torch's optimizers that has the parameter's shape."""
_NEEDED = {"Adam": ("step", "exp_avg", "exp_avg_sq"), "AdamW": ("step", "exp_avg", "exp_avg_sq")}
"""State of torch's optimizers that a parameter has where it has any."""
_BATCHES = 1000
"""How many batches more than twice its length a loader may have handed out in an epoch."""


class Shown(Mapping[str, Tensor]):
    """A checkpoint's tensors without values."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Tensor:
        entry = self.entries[key]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def see(condition: bool, said: str) -> None:
    """Refuse what is not as it must be.

    Raises:
        ValueError: `said` names it.
    """
    if not condition:
        raise ValueError(said)


def is_count(value: Any, least: int = 0, most: int = _MOST) -> bool:
    """Whether it is a whole number in a range."""
    return type(value) is int and least <= value <= most


# Models and what trains them.


def head(content: Mapping[str, Any]) -> None:
    """Steps, world, plan, and that there is a place for everything."""
    run = content["run"]
    for name in ("models", "optimizers", "schedulers", "loaders"):
        see(isinstance(run[name], list), name)
    see(isinstance(run["user"], dict), "user")
    see(is_count(content["step"], most=_MOST_STEPS), f"step {content['step']!r}")
    see(is_count(content["world"], least=1), f"world {content['world']!r}")
    see(type(content["plan"]) is str, f"plan {content['plan']!r}")
    see(type(content.get("bucket bytes")) in (str, type(None)), f"bucket bytes {content.get('bucket bytes')!r}")


def models(saved: Sequence[Mapping[str, Any]], shown: Shown) -> None:
    """Values beside parameters, and the versions that modules read them by."""
    for number, one in enumerate(saved):
        unpack(dict(one["state"]), shown)
        for name, module in unpack(one.get("metadata", {}), shown).items():
            see(type(name) is str and isinstance(module, dict), f"metadata of model {number}")
            good = module.get("version") is None or is_count(module["version"])
            see(good and "assign_to_params_buffers" not in module, f"metadata of {name!r} in model {number}")


def optimizer(saved: Mapping[str, Any], here: Optimizer, keys: Mapping[int, str], shown: Shown) -> None:
    """An optimizer's options and state, beside the one here."""
    if "whole" in saved:
        see(own_way(here), f"a {type(here).__name__} whose state is its own affair")
        see(isinstance(unpack(saved["whole"], shown), dict), "the state of an optimizer")
        return
    see(isinstance(unpack(saved.get("other", {}), shown), dict), "state of no parameter")
    for group, given in zip(here.param_groups, saved["groups"], strict=True):
        _options(unpack(given["options"], shown), group if _is_known(type(here)) else {})
    see(isinstance(saved["state"], dict), "an optimizer's state")
    torchs = _is_known(type(here))
    for key in [keys[id(param)] for group in here.param_groups for param in group["params"]]:
        values = saved["state"].get(key, {})
        see(isinstance(values, dict), f"the state of {key!r}")
        unpack(values, shown)
        if torchs and values:
            _state(key, values, _NEEDED.get(type(here).__name__, ()), shown)
    if torchs:
        _trial(here, saved, keys, shown)


def _trial(here: Optimizer, saved: Mapping[str, Any], keys: Mapping[int, str], shown: Shown) -> None:
    """Let a stand-in for one of torch's optimizers take the state."""
    trial = type(here).__new__(type(here))
    state = {p: unpack(saved["state"].get(keys[id(p)], {}), shown) for g in here.param_groups for p in g["params"]}
    groups = [
        {**group, **unpack(g["options"], shown)} for group, g in zip(here.param_groups, saved["groups"], strict=True)
    ]
    held = {p: values for p, values in state.items() if values}
    trial.__setstate__({"defaults": dict(here.defaults), "state": held, "param_groups": groups})


def _options(saved: Any, have: Mapping[str, Any]) -> None:
    see(isinstance(saved, dict) and "params" not in saved, "options of a group")
    for name, value in saved.items():
        fits = type(name) is str and (alike(value, have[name]) if name in have else _is_one(value))
        see(fits, f"option {name!r} of a group is {str(value)[:100]}")


def alike(saved: Any, have: Any) -> bool:
    """Whether a saved option can stand where there is this one: a number for a number, a flag for a flag."""
    if isinstance(have, Tensor) and have.numel() != 1:
        return isinstance(saved, Tensor) and saved.shape == have.shape
    if isinstance(have, bool):
        return saved is None or (type(saved) in (bool, int) and saved in (0, 1))
    if isinstance(have, int | float | Tensor):
        return _is_number(saved)
    if isinstance(have, str):
        return isinstance(saved, str)
    if isinstance(have, tuple):
        same = isinstance(saved, list | tuple) and len(saved) == len(have)
        return same and all(alike(*pair) for pair in zip(saved, have, strict=True))
    if isinstance(have, list):
        return isinstance(saved, list | tuple)
    if isinstance(have, Mapping):
        return isinstance(saved, Mapping)
    return _is_one(saved)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MOST)


def _is_one(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _state(key: str, values: Mapping[str, Any], needed: Sequence[str], shown: Shown) -> None:
    """One parameter's state, as torch's optimizers keep it."""
    missing = [name for name in needed if values.get(name) is None]
    see(not missing, f"{key!r} has no {', '.join(missing)}")
    shape = shown.entries[key].shape if key in shown.entries else None
    for name, value in unpack(values, shown).items():
        if name == "step":
            number = isinstance(value, Tensor) or (type(value) in (int, float) and 0 <= value <= _MOST)
            see(number and _is_one(value), f"step of {key!r}")
        elif name in _LIKE_PARAMETER and value is not None:
            like = isinstance(value, Tensor) and (shape is None or tuple(value.shape) == shape)
            see(like, f"{name} of {key!r}")


def scheduler(saved: Any, here: LRScheduler, kept: Sequence[object], shown: Shown) -> None:
    """A scheduler's state: tried on a copy, where the class is torch's or ours."""
    state = unpack(saved, shown)
    see(isinstance(state, dict), "a scheduler's state")
    if not _is_known(type(here)):
        return
    have = here.state_dict()
    for name, value in state.items():
        fits = alike(value, have[name]) if name in have else not hasattr(here, str(name))
        see(fits, f"{name} of a {type(here).__name__}")
    try:
        trial = copy.deepcopy(here, {id(one): one for one in [here.optimizer, *kept]})
    except Exception:  # it holds something that has no copy
        return
    trial.load_state_dict(state)


def _is_known(kind: type) -> bool:
    """Whether it is a class of torch or of this library, not one of the user's own."""
    return kind.__module__.partition(".")[0] in ("torch", "distributedtorch")


def user(saved: Any, here: object, shown: Shown) -> None:
    """State of an object of the user's: that it is plain, and of a module that its tensors have its shapes."""
    state = unpack(saved, shown)
    if isinstance(here, nn.Module):
        see(isinstance(state, dict), f"the state of a {type(here).__name__}")
        for name, tensor in [*here.named_parameters(), *here.named_buffers()]:
            value = state.get(name, tensor)
            like = isinstance(value, Tensor) and (tensor.numel() < 2 or value.shape == tensor.shape)  # 0: perhaps lazy
            see(like, f"{name!r} of a {type(here).__name__}")


def unfolding(run: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Tensors may be named more than once (each place then has its own copy), but not over and over."""
    parts: list[Any] = [*run["schedulers"], *run["user"].values()]
    for one in run["optimizers"]:
        parts += [{**one, "state": None}, *one["state"].values()]
    stored = sum(map(_bytes, entries.values()))
    total = sum(_bytes(entries[key]) for part in parts for key in set(named(part)))
    see(total <= _TIMES * stored + _BESIDE, f"tensors of {total:,} bytes are named, {stored:,} are stored")


def _bytes(entry: Entry) -> int:
    return entry.numel * entry.dtype.itemsize


# Where data goes on.


def loader(saved: Mapping[str, Any], here: Loader | None) -> None:
    """Where a loader stands; `here` is None for one that is not met yet."""
    cursor = saved["cursor"]
    counts = [cursor[name] for name in ("batch", "batches", "samples")]
    see(is_count(cursor["epoch"], least=-1) and all(map(is_count, counts)), "where a loader stands")
    see(type(cursor["ended"]) is bool and counts[0] <= counts[1], "where a loader stands")
    theirs = [] if here is None else here.place._generators()
    _generators(saved["generators"], theirs)
    began = saved.get("began")
    if began is None:
        return
    _generators(began["generators"], theirs)
    order(began["order"])
    _, length = saved.get("batch") or (None, None)
    if length is not None:
        see(is_count(length), f"a loader of {length!r} batches")
        see(counts[0] <= 2 * length + _BATCHES, f"{counts[0]:,} batches of {length:,} were handed out")


def _generators(saved: Any, theirs: Sequence[torch.Generator]) -> None:
    see(isinstance(saved, list), "a loader's generators")
    for number, text in enumerate(saved):
        state = from_plain({"torch": text, "python": None, "numpy": None}).torch
        if number < len(theirs):
            torch.Generator(theirs[number].device).set_state(state)


def order(saved: Mapping[str, Any]) -> State:
    """Random states, each tried on a generator of its own."""
    state = from_plain(saved)
    torch.Generator().set_state(state.torch)
    if state.python is not None:
        random.Random().setstate(state.python)
        see(type(state.python[2]) in (float, type(None)), "Python's random state")
    if state.numpy is not None:
        inner = state.numpy["state"]
        see(inner["key"].shape == (624,) and is_count(inner["pos"], most=624), "numpy's random state")
        good = state.numpy["has_gauss"] in (0, 1) and type(state.numpy["gauss"]) in (int, float)
        see(good, "numpy's random state")
        np.random.RandomState(0).set_state(state.numpy)
    return state


def loss_scale(saved: Mapping[str, Any]) -> None:
    """The scale of `fp16`."""
    see(type(saved["value"]) in (int, float) and 0 < saved["value"] < math.inf, f"loss scale {saved['value']!r}")
    see(is_count(saved["good"]) and is_count(saved["skipped"]), "counts of the loss scale")
