"""`dt.save`, `dt.load`, `dt.resume`: everything distributed in this run, in files that any plan and world can read.

Every rank writes what it keeps and reads what it needs; where all ranks have the same, each writes a share. All ranks
come to the same verdict before a save returns and before a load changes anything. A save that is not waited for copies
first and writes behind training: what the files hold is the moment of the call.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn

from distributedtorch import behind
from distributedtorch.checkpoint import index, meeting, place
from distributedtorch.checkpoint.blocks import damaged
from distributedtorch.checkpoint.every import Every
from distributedtorch.checkpoint.index import NewerError, Reader
from distributedtorch.checkpoint.place import Place
from distributedtorch.contents import check_state
from distributedtorch.core.errors import CheckpointError, DistributedTorchError, explain
from distributedtorch.core.world import here
from distributedtorch.data.cursor import Cursor
from distributedtorch.distribute import take_waiting
from distributedtorch.launch import record
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN
from distributedtorch.stored import Stored

_UNITS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


class Resumed(NamedTuple):
    """Where a run goes on."""

    step: int
    """Optimizer steps taken before."""
    epoch: int
    """The epoch to begin with: `for epoch in range(resumed.epoch, epochs)`."""
    path: str | None
    """The checkpoint; None where there was none."""

    @property
    def batch(self) -> int:
        """How many batches of the epoch that comes next are done: `for i, batch in enumerate(loader, resumed.batch)`.

        0 where it begins at its beginning, and so in every epoch after the one that was resumed.
        """
        RUN.pace.told = True
        fed, waiting = behind.fed_by(), RUN.fed - len(RUN.loaders)
        if fed is not None:
            return fed.place.pending
        one = RUN.unclaimed[waiting] if waiting < len(RUN.unclaimed) else {}
        return int(one["cursor"]["batch"]) if "began" in one else 0


def save(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    wait: bool = True,
    keep: int = 2,
    private: bool = True,
) -> behind.Saving:
    """Write the state of everything distributed as the newest checkpoint in the folder `path`.

    Called on all ranks it returns when the checkpoint is committed. Called on some ranks only, it says so and returns,
    and all ranks carry it out after their next optimizer step, or at exit, with that moment's state.

    Args:
        path: A folder that holds checkpoints, or an address of a store (`s3://bucket/folder`) that fsspec can open.
            A kill at any moment leaves the earlier checkpoints as they were.
        model: Write this model only.
        state: The user's own objects by name, each with `state_dict()` and `load_state_dict()`; rank 0's are written.
        wait: False returns when everything is copied, and writes behind training. Failures are printed at the next
            step, and raised by the result's `wait()`.
        keep: How many checkpoints stay in the folder, this one included.
        private: Files that only their owner can read.

    Returns:
        The save: `.path`, `.done`, `.wait()`.

    Raises:
        CheckpointError: It could not be written; raised on all ranks, and earlier checkpoints are as they were.
    """
    world = join_world()
    _refuse_nothing()
    if keep < 1:
        raise CheckpointError(explain(f"keep={keep}", "1 or more", "keep=1 keeps the newest"))
    request = _request(path, model, state, wait=wait, keep=keep, private=private)
    if world.size == 1:
        return behind.finish(behind.begin(request, [0]), request)
    if meeting.of(world.loop, behind.together).ask(request):
        assert behind.STATE.last is not None
        return behind.STATE.last
    where = json.loads(request)["path"]
    return behind.STATE.promised.setdefault(where, behind.Saving(where, promised=True))


def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, state: Mapping[str, Any] | None = None
) -> None:
    """Read what `save` wrote, under any plan and any number of ranks, into everything distributed. A group call.

    Everything is read and checked before anything is changed. The loop then goes on where it was: loaders hand out the
    batches that were left, in their order, and random layers draw on. Optimizers, schedulers and loaders are left as
    they are where this process has none of them or the checkpoint has none.

    Args:
        path: The folder given to `save`: its newest checkpoint is read, or where that is damaged the one before it,
            which is said. Or one checkpoint in it: that one or none.
        model: Read this model only: the checkpoint's only one, or the one at its place.
        state: The user's own objects, as in `save`.

    Raises:
        CheckpointError: Damaged, missing, or of another model; raised on all ranks, and nothing is changed.
    """
    join_world()
    if model is None:
        take_waiting()
    found = _find(path, model, check_state(state))
    if found is None:
        given = f"{os.fspath(path)} holds no checkpoint"
        raise CheckpointError(explain(given, "a folder written by dt.save", "check the path"))
    _take_over(found)


def resume(
    path: str | os.PathLike[str],
    *,
    save_every: int | str | timedelta | None = None,
    state: Mapping[str, Any] | None = None,
    keep: int = 2,
    private: bool = True,
) -> Resumed:
    """Go on from the newest good checkpoint in `path`, or start where there is none; say which. A group call.

    Args:
        path: The folder, as in `save`.
        save_every: Save there from now on: every so many optimizer steps (500), or so often ("10min", "1h", a
            timedelta). Written behind training.
        state: The user's own objects, as in `save`.
        keep: As in `save`.
        private: As in `save`.

    Returns:
        `step` and `epoch` to go on with.

    Raises:
        CheckpointError: All checkpoints are damaged, or of another model; raised on all ranks, nothing is changed.
    """
    world = join_world()
    _refuse_nothing()
    take_waiting()
    every = None if save_every is None else _period(save_every)
    if every is not None and every[0] is None and any(not member.sync.meets for member in world.loop.members):
        given, do = f"save_every={save_every!r} under {RUN.plan}", "give a number of steps: save_every=500"
        raise CheckpointError(explain(given, "steps to count: these ranks do not meet by the clock", do))
    found = _find(path, None, check_state(state))
    if found is not None:
        _take_over(found)
    said = os.fspath(path)
    resumed = Resumed(
        world.loop.steps, _epoch(), None if found is None else found.reader.place.file(found.reader.folder, "")
    )
    if world.rank == 0:
        record.say(_went_on(resumed, said))
    if every is not None:
        request = _request(path, None, state, wait=False, keep=keep, private=private, every=True)
        steps, seconds = every
        atexit.unregister(behind.drop_timed)
        atexit.register(behind.drop_timed)
        behind.STATE.every = Every(request, steps, seconds, world.loop.steps, time.monotonic())
    return resumed


def _went_on(resumed: Resumed, said: str) -> str:
    if resumed.path is None:
        return f"nothing to resume in {said}: starts from the beginning"
    cursor = _cursor()
    inside = "" if cursor is None or cursor.ended else f", after batch {cursor.batch} of its epoch{RUN.pace.counts}"
    epoch = f", epoch {resumed.epoch}{inside}" if cursor is not None else ""
    return f"resumed from {resumed.path}: step {resumed.step}{epoch}"


def _cursor() -> Cursor | None:
    """Where the loader that feeds the loop stands, also where it is not met again yet."""
    fed, waiting = behind.fed_by(), RUN.fed - len(RUN.loaders)
    if fed is not None:
        return fed.cursor
    return Cursor(**RUN.unclaimed[waiting]["cursor"]) if waiting < len(RUN.unclaimed) else None


def _epoch() -> int:
    cursor = _cursor()
    return 0 if cursor is None else cursor.epoch + cursor.ended


def _period(given: int | str | timedelta) -> tuple[int | None, float | None]:
    """Steps, or seconds."""
    if isinstance(given, timedelta) and given.total_seconds() > 0:
        return None, given.total_seconds()
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given, None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", given) if isinstance(given, str) else None
    if found and found[2] in _UNITS and float(found[1]) > 0:
        return None, float(found[1]) * _UNITS[found[2]]
    do = 'save_every=500 for steps, save_every="10min" for time'
    raise CheckpointError(explain(f"save_every={given!r}", "a number of steps, or a time (s, min, h)", do))


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


def _request(path: str | os.PathLike[str], model: nn.Module | None, state: Mapping[str, Any] | None, **how: Any) -> str:
    said = os.fspath(path)
    where = said if "://" in said else os.path.realpath(said)
    part = {} if model is None else {"model": _number(model)}
    behind.STATE.user[where, how.get("every", False)] = check_state(state)
    return json.dumps({"path": where, **part, **how})


# Finding what to load.


def _find(path: str | os.PathLike[str], model: nn.Module | None, state: dict[str, Any]) -> Stored | None:
    """The newest checkpoint that is whole and fits, the same on all ranks; None where there is none at all.

    Raises:
        CheckpointError: None is whole, or the newest whole one is not of this run.
    """
    world = here()
    behind.settle()
    said = os.fspath(path)
    cards = _of_all("load", {"path": said, **(_candidates(said) if world.rank == 0 else {})})
    for rank, other in enumerate(cards):
        if other["path"] != said:
            given = f"path {said!r} here and {other['path']!r} on rank {rank}"
            raise CheckpointError(explain(given, "one path on all ranks", "give the same path everywhere"))
    card = cards[0]
    if "fault" in card:
        raise CheckpointError(card["fault"])
    there, faults = place.of(card["root"]), []
    if world.rank == 0 and card.get("unfinished"):
        record.say(_passed_over(there, card["unfinished"]))
    for folder in card["names"]:
        stored, verdict = _attempt(there, folder, model, state)
        verdicts = _of_all("load", verdict)
        bad = {rank: one for rank, one in enumerate(verdicts) if one["kind"] != "good"}
        if not bad and len({one["said"] for one in verdicts}) == 1:
            return stored
        if not bad:
            given = f"the ranks read different checkpoints at {there.file(folder, '')}"
            do = "save to a disk that all hosts share"
            raise CheckpointError(explain(given, "one that all ranks see", do))
        rank, first = next(iter(bad.items()))
        said = first["said"] if len(bad) == len(verdicts) else f"on rank {rank}: {first['said']}"
        if any(one["kind"] == "misfit" for one in bad.values()) or card["exact"]:
            raise CheckpointError(said)
        faults.append(said)
        if world.rank == 0:
            record.say(f"checkpoint {folder} is damaged, the one before it is tried: {said}")
    if faults:
        raise CheckpointError(faults[0] if len(faults) == 1 else f"{len(faults)} checkpoints are damaged; {faults[0]}")
    return None


def _candidates(path: str) -> dict[str, Any]:
    """On rank 0: which checkpoints a path means."""
    try:
        root, one = place.split(path)
        if one is not None:
            return {"root": root, "names": [one], "exact": True}
        there: Place = place.of(path)
        return {"root": path, "names": there.committed(), "exact": False, "unfinished": there.unfinished()}
    except Exception as error:
        said = explain(
            f"{path}: {error}", "a folder or a store that can be read", "check the path and the access to it"
        )
        return {"fault": str(error) if isinstance(error, CheckpointError) else said}


def _passed_over(there: Place, unfinished: list[str]) -> str:
    """What is called like a checkpoint and is none."""
    more = f" and {len(unfinished) - 1} more" if len(unfinished) > 1 else ""
    said = f"{there.file(unfinished[0], '')}{more} passed over: no {place.INDEX} in it"
    return f"{said}, so no checkpoint (a save that was cut off, or something else of that name)"


def _attempt(
    there: Place, folder: str, model: nn.Module | None, state: dict[str, Any]
) -> tuple[Stored | None, dict[str, str]]:
    """One checkpoint, with this rank's verdict on it; each rank checks a share of the bytes."""
    try:
        _refuse_nothing()
        if model is not None:
            _number(model)
    except CheckpointError as error:
        return None, {"kind": "misfit", "said": str(error)}
    try:
        found = index.read(there, folder)
        reader = Reader(there, folder, found)
        stored = Stored(reader, model, state)
        misfit = stored.misfit()
        if misfit:
            return None, {"kind": "misfit", "said": misfit}
        reader.check(here().rank, here().size)
        stored.prepare()
    except NewerError as error:
        return None, {"kind": "misfit", "said": str(error)}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        if not isinstance(error, CheckpointError):
            error = damaged(f"{there.file(folder, '')} is not what dt.save writes ({type(error).__name__}: {error})")
        return None, {"kind": "damaged", "said": str(error)}
    return stored, {"kind": "good", "said": found.digest}


def _of_all(name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    if here().size == 1:
        return [mine]
    return [json.loads(card) for card in here().comm.bytes_of_all(name, json.dumps(mine).encode())]


def _take_over(found: Stored) -> None:
    """Put a checkpoint into the run, or raise on all ranks; what was asked for before is about another state."""
    for act in (found.apply_user, found.apply):
        error = _applied(found, act)
        verdicts = [verdict["said"] for verdict in _of_all("load", {"said": "" if error is None else str(error)})]
        bad = [rank for rank, said in enumerate(verdicts) if said]
        if bad:
            said = verdicts[bad[0]]
            raise CheckpointError(said if len(bad) == len(verdicts) else f"on rank {bad[0]}: {said}") from error
    RUN.seed = torch.initial_seed()
    if behind.STATE.every is not None:
        behind.STATE.every.began()


def _applied(found: Stored, act: Callable[[], None]) -> Exception | None:
    """Why this rank could not take a checkpoint, or a part of it, over, if so."""
    try:
        with torch.inference_mode(False):
            act()
    except CheckpointError as error:
        return error
    except (*index._WRONG, RuntimeError) as error:
        if isinstance(error, DistributedTorchError):
            raise
        where = found.reader.place.file(found.reader.folder, "")
        given = f"{where} is whole, but cannot be taken over ({type(error).__name__}: {error})"
        do = "start again, with another checkpoint: this run's state is partly changed"
        failed = CheckpointError(explain(given, "state that dt.save has written", do))
        failed.__cause__ = error
        return failed
    return None
