"""Optimizer state, whole for the user and divided on the ranks; the optimizer's step on what a rank owns."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.sync.gradient import Held

_PLAIN = (bool, int, float, str, type(None))


def step_on(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], mine: dict[int, Tensor], step: Callable[[], Any]
) -> Any:
    """Run the optimizer's own `step` with `params` replaced by what this rank owns; others of its parameters stay.

    `mine` has a tensor with a gradient for every number of a parameter that this rank updates.
    """
    groups, state = optimizer.param_groups, optimizer.state
    theirs = [group["params"] for group in groups]
    place = {id(param): index for index, param in enumerate(params)}
    swapped: defaultdict[Tensor, Any] = defaultdict(dict)
    swapped.update({key: value for key, value in state.items() if id(key) not in place})
    swapped.update({mine[i]: state[p] for i, p in enumerate(params) if i in mine and p in state})
    try:
        for group, given in zip(groups, theirs, strict=True):
            stays = [p for p in given if place.get(id(p), -1) in mine or id(p) not in place]
            group["params"] = [mine[place[id(p)]] if id(p) in place else p for p in stays]
        optimizer.state = swapped
        return step()
    finally:
        for group, given in zip(groups, theirs, strict=True):
            group["params"] = given
        back = {id(piece): params[index] for index, piece in mine.items()}
        state.update({back.get(id(key), key): value for key, value in swapped.items()})
        optimizer.state = state


def divide_state(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], held: Sequence[Held], *, whole: bool
) -> None:
    """Keep of the optimizer's whole state what this rank owns."""
    for param, mine in zip(params, held, strict=True):
        if param not in optimizer.state:
            continue
        state = optimizer.state.pop(param)
        if mine.bounds[mine.comm.rank] < mine.bounds[mine.comm.rank + 1]:
            optimizer.state[param] = state if whole else {key: _piece(key, value, mine) for key, value in state.items()}


def gather_state(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], held: Sequence[Held], comm: Comm, *, whole: bool
) -> dict[nn.Parameter, dict[str, Any]]:
    """The whole state of every parameter, as one process would hold it. A group call."""
    cards = [json.loads(card) for card in comm.bytes_of_all("optimizer state", _card(optimizer, params, held, whole))]
    full: dict[nn.Parameter, dict[str, Any]] = {}
    for index, param in enumerate(params):
        owners = [rank for rank in range(comm.world) if str(index) in cards[rank]]
        if owners:
            mine = optimizer.state.get(param)
            full[param] = _whole(cards[owners[0]][str(index)], mine, held[index], owners[0], "")
    return full


def _card(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], held: Sequence[Held], whole: bool) -> bytes:
    """What this rank has, in words: kind, dtype, shape of every value."""
    said = {
        str(index): _kind(dict(optimizer.state[param]), held[index], whole)
        for index, param in enumerate(params)
        if param in optimizer.state
    }
    return json.dumps(said).encode()


def _kind(value: Any, held: Held, whole: bool) -> list[Any]:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        divided = not whole and value.shape == held.local.shape
        return ["piece" if divided else "tensor", dtype, list(value.shape), str(value.device.type)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_kind(item, held, whole) for item in value]]
    if type(value) is dict and all(isinstance(key, _PLAIN) for key in value):
        return ["dict", [[key, _kind(item, held, whole)] for key, item in value.items()]]
    return ["plain", value] if isinstance(value, _PLAIN) else ["other", type(value).__name__]


def _whole(card: list[Any], mine: Any, held: Held, owner: int, path: str) -> Any:
    """A value as one process would hold it; `mine` is what this rank has of it, or None."""
    kind, inside = card[0], card[1]
    if kind == "plain":
        return inside
    if kind == "other":
        raise UsageError(_strange(held.name, path, inside))
    if kind == "dict":
        return {key: _whole(item, _item(mine, key), held, owner, f"{path} {key}") for key, item in inside}
    if kind in ("list", "tuple"):
        items = [_whole(item, _item(mine, k), held, owner, f"{path} {k}") for k, item in enumerate(inside)]
        return items if kind == "list" else tuple(items)
    dtype, comm = getattr(torch, inside), held.comm
    device = held.local.device if card[3] == held.local.device.type else torch.device(card[3])
    name = f"optimizer state{path} of {held.name}"
    if kind == "tensor":
        value = mine.clone() if comm.rank == owner else torch.empty(card[2], dtype=dtype, device=device)
        comm.broadcast(name, value, owner)
        return value
    flat = torch.empty(held.slot.numel, dtype=dtype, device=device)
    if mine is not None:
        flat[held.bounds[comm.rank] : held.bounds[comm.rank + 1]] = mine.flatten()
    comm.all_gather(name, flat, held.bounds).wait()
    return flat.as_strided(held.slot.shape, held.slot.stride)


def _item(mine: Any, key: Any) -> Any:
    return None if mine is None else mine[key]


def _piece(key: str, value: Any, held: Held) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_piece(key, item, held) for item in value)
    if type(value) is dict:
        return {inner: _piece(key, item, held) for inner, item in value.items()}
    same = isinstance(value, Tensor) and value.shape == held.slot.shape and (value.dim() > 0 or key != "step")
    return held.mine(value).clone().view(held.local.shape) if same else value


def _strange(name: str, path: str, kind: str) -> str:
    given = f"the optimizer's state{path} of parameter {name!r} is a {kind}, and the plan divides that state"
    needed = "tensors, numbers, text, and lists, tuples and dicts of them: they can be gathered from the ranks"
    return explain(given, needed, 'keep it in one of these, or use plan="ddp"')
