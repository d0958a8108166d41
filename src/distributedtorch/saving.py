"""`dt.save` and `dt.load`: everything distributed in this run, as full plain tensors that any plan and world can read.

Rank 0 writes; under zero1 and zero2 the optimizer's state is gathered first (K Psi bytes to every rank). Every rank
reads. All ranks come to the same verdict: they exchange it before a save returns and before a load changes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.checkpoint import folder, meeting
from distributedtorch.checkpoint.plain import Packer, unpack
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.step import Member
from distributedtorch.core.world import here
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN

_SHOWN = 5


def save(path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
    """Write the state of everything distributed into the folder `path`, replacing the checkpoint that is there.

    Called on all ranks it returns when the new checkpoint is in place. Called on some ranks only, it is written at once
    where one rank holds everything (ddp); else it says so and returns, and all ranks carry it out after their next
    optimizer step, or at exit, with that moment's state.

    Args:
        path: A folder of its own. A kill at any moment leaves the old checkpoint or the new one.
        model: Write this model only.

    Raises:
        CheckpointError: It could not be written; raised on all ranks, and the old checkpoint is as it was.
    """
    world = join_world()
    _refuse_nothing()
    request = {"path": os.path.realpath(path)} | ({} if model is None else {"model": _number(model)})
    if world.size == 1:
        _alone(request)
        return
    divided = any(member.sync.divided for member in world.loop.members)
    alone = None if divided and model is None else lambda: _alone(request)
    meeting.of(world.loop, _together).ask(json.dumps(request), alone)


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
    """Read the state that `save` wrote, under any plan and any number of ranks, into everything distributed.

    A group call. Everything is read and checked on every rank before anything is changed. Optimizers, schedulers and
    cursors are left as they are where this process has none of them or the checkpoint has none.

    Args:
        path: The folder given to `save`.
        model: Read this model only: the checkpoint's only one, or the one at its place.

    Raises:
        CheckpointError: Damaged, missing, or of another model; raised on all ranks, and nothing is changed.
    """
    join_world()
    fault, digest, state = "", "", None
    try:
        _refuse_nothing()
        content, tensors, digest = folder.read(Path(os.path.realpath(path)))
        state = _State(content, tensors, model)
        fault = state.fault()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        fault = str(error) if isinstance(error, CheckpointError) else f"{path}: {type(error).__name__}: {error}"
    _same_verdict(fault, digest)
    assert state is not None
    state.apply()


def carry_out_after_step(_: Sequence[Member]) -> None:
    """Every rank, after every step: carry out the saves that only some ranks asked for."""
    loop = here().loop
    if loop.comm.world > 1:
        meeting.of(loop, _together).stepped()


def carry_out_put_off() -> None:
    """Carry out now the saves that only some ranks asked for. A group call."""
    if here().size > 1 and RUN.models:
        meeting.of(here().loop, _together).catch_up()


def _refuse_nothing() -> None:
    if not RUN.models:
        given = "dt.save or dt.load before dt.distribute"
        raise CheckpointError(explain(given, "something distributed", "call dt.distribute(model, ...) first"))


def _number(model: nn.Module) -> int:
    for number, known in enumerate(RUN.models):
        if known is model:
            return number
    do = "pass a model that was given to dt.distribute, or use torch.save"
    raise CheckpointError(explain(f"model= is a {type(model).__name__} that is not distributed", "one that is", do))


# Saving.


def _together(request: str) -> None:
    """Gather, and let rank 0 write: a group call."""
    asked = json.loads(request)
    optimizers = _optimizer_states(asked)
    fault = ""
    if here().rank == 0:
        try:
            _write(asked, optimizers)
        except CheckpointError as error:
            fault = str(error)
    fault = here().comm.bytes_of_all("save", fault.encode())[0].decode()
    if fault:
        raise CheckpointError(fault)


def _alone(asked: dict[str, Any]) -> None:
    """Write what this rank holds, which is everything."""
    _write(asked, _optimizer_states(asked))


def _optimizer_states(asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if "model" in asked else [optimizer.state_dict() for optimizer in RUN.optimizers]


def _write(asked: dict[str, Any], optimizers: list[dict[str, Any]]) -> None:
    """Any failure is a CheckpointError: the other ranks wait for the verdict."""
    try:
        folder.write(Path(asked["path"]), *_content(asked, optimizers))
    except CheckpointError:
        raise
    except Exception as error:
        given = f"{asked['path']} could not be written: {error}"
        do = "check its folder and its disk; training can go on, and an old checkpoint is as it was"
        raise CheckpointError(explain(given, f"a place that rank {here().rank} can write to", do)) from error


def _content(asked: dict[str, Any], optimizers: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into run.json, and tensors by file."""
    part = "model" in asked
    models = [RUN.models[asked["model"]]] if part else RUN.models
    schedulers = [] if part else RUN.schedulers
    state: dict[str, list[Any]] = {
        "model": [[_kind(m), m.state_dict()] for m in models],
        "optimizer": [[_kind(o), s] for o, s in zip(RUN.optimizers, optimizers, strict=not part)],
        "scheduler": [[_kind(s), s.state_dict()] for s in schedulers],
    }
    tensors: dict[str, dict[str, Tensor]] = {}
    for word, parts in state.items():
        for place, pair in enumerate(parts):
            packer = Packer(f"{word} {place} ({pair[0]})")
            pair[1] = packer.pack(pair[1])
            if packer.tensors:
                tensors[f"{word}.{place}.safetensors"] = packer.tensors
    run = {
        "versions": {"distributedtorch": version("distributedtorch"), "torch": torch.__version__},
        "plan": str(RUN.plan),
        "world": here().size,
        "steps": here().loop.steps,
        "cursors": [] if part else [loader.cursor.state_dict() for loader in RUN.loaders],
        "state": state,
    }
    return run, tensors


def _kind(thing: object) -> str:
    return type(thing).__name__


# Loading.


class _State:
    """What a checkpoint holds, beside what it is to go into."""

    def __init__(self, run: dict[str, Any], tensors: dict[str, dict[str, Tensor]], model: nn.Module | None) -> None:
        self.run, self.part = run, model is not None
        self.models: list[nn.Module] = RUN.models if model is None else [model]
        self.saved: dict[str, list[Any]] = {}
        for word in ("model", "optimizer", "scheduler"):
            files = [tensors.get(f"{word}.{place}.safetensors", {}) for place in range(len(run["state"][word]))]
            pairs = zip(run["state"][word], files, strict=True)
            self.saved[word] = [(kind, unpack(state, file)) for (kind, state), file in pairs]
        if model is not None and len(self.saved["model"]) > 1:
            self.saved["model"] = self.saved["model"][_number(model) :][:1]

    def fault(self) -> str:
        """Why it does not fit, or nothing."""
        if len(self.models) != len(self.saved["model"]):
            given = f"the checkpoint holds {len(self.saved['model'])} models, {len(self.models)} are to be loaded"
            do = "distribute the same models in the same order, or dt.load(path, model=...)"
            return explain(given, "as many", do)
        for number, (model, (kind, state)) in enumerate(zip(self.models, self.saved["model"], strict=True)):
            lines = difference(model.state_dict(), state)
            if lines:
                given = f"model {number} ({_kind(model)}) is not the one that was saved ({kind}):\n" + "\n".join(lines)
                return explain(given, "the same parameters and buffers", "build the model as it was when saved")
        return "" if self.part else self._other_fault()

    def _other_fault(self) -> str:
        shapes = {
            "optimizers": (
                [_groups(kind, state["param_groups"]) for kind, state in self.saved["optimizer"]],
                [_groups(_kind(optimizer), optimizer.param_groups) for optimizer in RUN.optimizers],
            ),
            "schedulers": ([kind for kind, _ in self.saved["scheduler"]], [_kind(s) for s in RUN.schedulers]),
            "loaders": (["a loader"] * len(self.run["cursors"]), ["a loader"] * len(RUN.loaders)),
        }
        for word, (saved, have) in shapes.items():
            if saved and have and saved != have:
                given = f"the checkpoint's {word} are: {', '.join(saved)}"
                return explain(given, f"as here: {', '.join(have)}", f"distribute the same {word}")
        return ""

    def apply(self) -> None:
        """Take everything over."""
        for model, (_, state) in zip(self.models, self.saved["model"], strict=True):
            model.load_state_dict(state)
        if self.part:
            return
        for optimizer, (_, state) in zip(RUN.optimizers, self.saved["optimizer"], strict=False):
            optimizer.load_state_dict(state)
        for scheduler, (_, state) in zip(RUN.schedulers, self.saved["scheduler"], strict=False):
            scheduler.load_state_dict(state)
        for loader, cursor in zip(RUN.loaders, self.run["cursors"], strict=False):
            loader.cursor.load_state_dict(cursor)
        here().loop.steps = int(self.run["steps"])


def _groups(kind: str, groups: list[dict[str, Any]]) -> str:
    return f"{kind} over {' + '.join(str(len(group['params'])) for group in groups)} parameters"


def difference(have: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """How two state dicts differ, in a few lines."""
    found = {
        "missing in the checkpoint": [name for name in have if name not in saved],
        "not in the model": [name for name in saved if name not in have],
        "of another shape or type": [
            f"{name} (saved {_looks(saved[name])}, here {_looks(have[name])})"
            for name in have
            if name in saved and _looks(saved[name]) != _looks(have[name])
        ],
    }
    return [
        f"    {what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in found.items()
        if names
    ]


def _looks(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _same_verdict(fault: str, digest: str) -> None:
    """Raise on all ranks what one has found, and refuse files that are not the same on all."""
    cards = [[fault, digest]]
    if here().size > 1:
        cards = [json.loads(card) for card in here().comm.bytes_of_all("load", json.dumps(cards[0]).encode())]
    faults = {rank: said for rank, (said, _) in enumerate(cards) if said}
    if faults:
        rank, said = next(iter(faults.items()))
        raise CheckpointError(said if len(faults) == len(cards) else f"on rank {rank}: {said}")
    if len({of for _, of in cards}) > 1:
        given = "the ranks read different checkpoints at one path"
        raise CheckpointError(explain(given, "one that all ranks see", "save to a disk that all hosts share"))
