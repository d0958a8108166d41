"""Optimizer state, whole for the user and divided on the ranks; the optimizer's step on what a rank owns."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.sync.gradient import Held


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
            mine = optimizer.state.get(param, {})
            keys = cards[owners[0]][str(index)]
            full[param] = {key: _whole(key, card, mine, held[index], owners[0]) for key, card in keys.items()}
    return full


def _card(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], held: Sequence[Held], whole: bool) -> bytes:
    """What this rank has, in words: kind, dtype, shape of every value."""
    said: dict[str, dict[str, Any]] = {}
    for index, param in enumerate(params):
        if param in optimizer.state:
            pieces = {key: _kind(value, held[index], whole) for key, value in optimizer.state[param].items()}
            said[str(index)] = pieces
    return json.dumps(said).encode()


def _kind(value: Any, held: Held, whole: bool) -> list[Any]:
    if not isinstance(value, Tensor):
        return ["plain", value]
    dtype = str(value.dtype).removeprefix("torch.")
    divided = not whole and value.shape == held.local.shape
    return ["piece" if divided else "tensor", dtype, list(value.shape), str(value.device.type)]


def _whole(key: str, card: list[Any], mine: dict[str, Any], held: Held, owner: int) -> Any:
    if card[0] == "plain":
        return card[1]
    dtype, comm = getattr(torch, card[1]), held.comm
    device = held.local.device if card[3] == held.local.device.type else torch.device(card[3])
    name = f"optimizer state {key} of {held.name}"
    if card[0] == "tensor":
        value = mine[key].clone() if comm.rank == owner else torch.empty(card[2], dtype=dtype, device=device)
        comm.broadcast(name, value, owner)
        return value
    flat = torch.empty(held.slot.numel, dtype=dtype, device=device)
    if key in mine:
        flat[held.bounds[comm.rank] : held.bounds[comm.rank + 1]] = mine[key].flatten()
    comm.all_gather(name, flat, held.bounds).wait()
    return flat.as_strided(held.slot.shape, held.slot.stride)


def _piece(key: str, value: Any, held: Held) -> Any:
    same = isinstance(value, Tensor) and value.shape == held.slot.shape and (value.dim() > 0 or key != "step")
    return held.mine(value).clone().view(held.local.shape) if same else value
