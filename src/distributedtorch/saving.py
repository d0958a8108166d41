"""`dt.save` and `dt.load`: everything distributed in this run, as full plain tensors, whatever the plan and the world.

Called on all ranks, `save` returns when the folder is in place. Called on some ranks only, it is carried out by all
after their next optimizer step, or when they end, and says so.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.checkpoint import simple as folder
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.step import Member
from distributedtorch.core.world import BEFORE_LEAVING, here
from distributedtorch.launch.join import client
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN

_SECONDS_TO_MEET = 1.0


def save(path: str | Path, model: nn.Module | None = None) -> None:
    """Save models, optimizers, schedulers and the position in the data as a folder; `model`: that one alone.

    Raises:
        CheckpointError: It could not be written; the same on all ranks, and what was there before still is.
    """
    world = join_world()
    request = {"path": str(Path(path).absolute()), "model": None if model is None else _number(model)}
    if world.size == 1 or _all_meet(request):
        _together(request)
    elif not any(hasattr(member.sync, "whole_state") for member in world.loop.members):
        _write(request)  # every rank holds everything
    else:
        client().add(_ASKED, 1)
        world.loop.requests.append(json.dumps(request))
        when = "all carry it out after their next optimizer step or at their end, with that moment's state"
        print(f"distributedtorch: dt.save was called on rank {world.rank} only: {when} ({path})", flush=True)


def load(path: str | Path) -> None:
    """Load what `save` wrote, under any plan and world, into what is distributed now. All ranks must call it.

    Raises:
        CheckpointError: It cannot be read, is damaged, or is of another model; then nothing has been changed.
    """
    join_world()
    fault = ""
    files: dict[str, dict[str, Tensor]] = {}
    card: dict[str, Any] = {}
    try:
        files, card = folder.read(Path(path))
        _check(files, card)
    except CheckpointError as error:
        fault = str(error)
    _same_verdict(fault)
    for number, model in enumerate(RUN.models):
        if f"model.{number}" in files:
            model.load_state_dict(files[f"model.{number}"])
    for number, optimizer in enumerate(RUN.optimizers):
        if f"optimizer.{number}" in files:
            optimizer.load_state_dict(_joined(files[f"optimizer.{number}"], card["optimizers"][number]))
    for scheduler, state in zip(RUN.schedulers, card["schedulers"], strict=False):
        scheduler.load_state_dict(state)
    for loader, state in zip(RUN.loaders, card["cursors"], strict=False):
        loader.cursor.load_state_dict(state)
    here().loop.steps = card["steps"]


def carry_out() -> None:
    """Carry out the saves that some rank asked for; all ranks call this at the same moment."""
    comm, loop = here().comm, here().loop
    mine, loop.requests, loop.requested = loop.requests, [], 0
    asked = [json.loads(rank) for rank in comm.bytes_of_all("saves asked for", json.dumps(mine).encode())]
    _done.append(sum(map(len, asked)))
    for request in dict.fromkeys(request for rank in asked for request in rank):
        _together(json.loads(request))


def carry_out_after_step(_: Member) -> None:
    """Every rank, after a step: if some rank asked in time, all know."""
    if here().loop.requested:
        carry_out()


_ASKED = "saves asked for"
_done: list[int] = []


def _all_meet(request: dict[str, Any]) -> bool:
    """Whether all ranks make this call now; decided once for all of them."""
    world = here()
    store, key = client(), f"save/{json.dumps(request)}/{world.loop.steps}"
    store.set(f"{key}/{world.rank}", "here")
    everyone = [f"{key}/{rank}" for rank in range(world.size)]
    deadline = time.monotonic() + _SECONDS_TO_MEET
    while not store.check(everyone) and time.monotonic() < deadline and not store.check([f"{key}/decision"]):
        time.sleep(0.005)
    said = "now" if store.check(everyone) else "later"
    return bool(store.compare_set(f"{key}/decision", "", said) == b"now")


def _together(request: dict[str, Any]) -> None:
    """All ranks: gather, and let rank 0 write."""
    gathered = _gathered(request)
    fault = ""
    if here().rank == 0:
        try:
            folder.write(Path(request["path"]), *gathered)
        except CheckpointError as error:
            fault = str(error)
    _same_verdict(fault)


def _write(request: dict[str, Any]) -> None:
    folder.write(Path(request["path"]), *_gathered(request))


def _gathered(request: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What there is to save; under plans that divide state this is a group call."""
    chosen = RUN.models if request["model"] is None else [RUN.models[request["model"]]]
    files: dict[str, dict[str, Tensor]] = {f"model.{_number(m)}": dict(m.state_dict()) for m in chosen}
    card: dict[str, Any] = {"optimizers": [], "schedulers": [], "cursors": []}
    if request["model"] is None:
        for number, optimizer in enumerate(RUN.optimizers):
            files[f"optimizer.{number}"], plain = _apart(optimizer.state_dict())
            card["optimizers"].append(plain)
        card["schedulers"] = [scheduler.state_dict() for scheduler in RUN.schedulers]
        card["cursors"] = [loader.cursor.state_dict() for loader in RUN.loaders]
    card |= {"steps": here().loop.steps, "plan": str(RUN.plan), "torch": torch.__version__, "world": here().size}
    return files, card


def _same_verdict(fault: str) -> None:
    """Raise on all ranks what went wrong on any."""
    faults = here().comm.bytes_of_all("verdict", fault.encode()) if here().size > 1 else [fault.encode()]
    for rank, text in enumerate(faults):
        if text:
            raise CheckpointError(text.decode() if here().size == 1 else f"rank {rank}: {text.decode()}")


def _number(model: nn.Module) -> int:
    for number, known in enumerate(RUN.models):
        if known is model:
            return number
    given = f"the {type(model).__name__} given has not been distributed"
    raise CheckpointError(explain(given, "a model passed to dt.distribute", "pass it there, or use torch.save"))


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name and the rest as plain data."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": state["param_groups"], "state": {}}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                plain["state"].setdefault(str(index), {})[key] = value
    return tensors, plain


def _joined(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in plain["state"].items()}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in plain["groups"]]
    return {"state": state, "param_groups": groups}


def _check(files: Mapping[str, Mapping[str, Tensor]], card: Mapping[str, Any]) -> None:
    """Compare with what is distributed now, before anything is changed."""
    faults = []
    for number, model in enumerate(RUN.models):
        if f"model.{number}" not in files:
            continue
        saved, own = files[f"model.{number}"], model.state_dict()
        faults += [f"missing in the file: {name}" for name in own if name not in saved]
        faults += [f"not in the model: {name}" for name in saved if name not in own]
        faults += [
            f"{name}: {tuple(saved[name].shape)} in the file, {tuple(own[name].shape)} in the model"
            for name in own
            if name in saved and saved[name].shape != own[name].shape
        ]
    for number, (optimizer, plain) in enumerate(zip(RUN.optimizers, card["optimizers"], strict=False)):
        sizes, own_sizes = ([len(g["params"]) for g in groups] for groups in (plain["groups"], optimizer.param_groups))
        if sizes != own_sizes:
            faults.append(f"optimizer {number}: groups of {sizes} parameters in the file, {own_sizes} here")
    if faults:
        shown = "\n    ".join(faults[:12])
        given = f"the checkpoint is of another model ({len(faults)} differences):\n    {shown}"
        raise CheckpointError(explain(given, "the model and optimizers it was saved from", "build the same, then load"))


def _at_exit() -> None:
    """What a rank asked for and no step carried out is carried out when all ranks end."""
    try:
        if client(timeout_seconds=2).add(_ASKED, 0) > sum(_done):
            carry_out()
    except (RuntimeError, ValueError) as error:
        print(
            f"distributedtorch: a save asked for on one rank was not carried out: {error}", file=sys.stderr, flush=True
        )


BEFORE_LEAVING.append(_at_exit)
