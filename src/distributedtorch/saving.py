"""`dt.save`, `dt.load`, `dt.resume`: everything distributed in this run, in files that any plan and world can read.

Every rank writes what it keeps and reads what it needs; where all ranks have the same, each writes a share. All ranks
come to the same verdict before a save returns and before a load changes anything. A save that is not waited for copies
first and writes behind training: what the files hold is the moment of the call.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from distributedtorch import attach
from distributedtorch.checkpoint import index, meeting, place, writing
from distributedtorch.checkpoint.index import NewerError, Reader
from distributedtorch.checkpoint.place import FOLDER, Place
from distributedtorch.contents import Stored, check_state, collect
from distributedtorch.core.errors import CheckpointError, DistributedTorchError, explain
from distributedtorch.core.step import Loop, Member
from distributedtorch.core.world import here
from distributedtorch.launch import record
from distributedtorch.launch.join import client
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN

_SECONDS_TO_END = 2.0
_UNITS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


class Resumed(NamedTuple):
    """Where a run goes on."""

    step: int
    """Optimizer steps taken before."""
    epoch: int
    """The epoch to begin with: `for epoch in range(resumed.epoch, epochs)`."""
    path: str | None
    """The checkpoint; None where there was none."""


class Saving:
    """A save, under way or done."""

    def __init__(self, path: str, *, promised: bool = False) -> None:
        self.path = path
        """Where it lies, when it is done."""
        self.promised = promised
        """Whether it has not begun: all ranks carry it out after their next step."""
        self.stalled = 0.0
        """Seconds that the training thread was held by it."""
        self.copied = threading.Event()
        self.told = False
        self._done = threading.Event()
        self._fault = ""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when it is committed.

        Raises:
            CheckpointError: It could not be written. The same on all ranks; earlier checkpoints are as they were.
        """
        if self.promised:
            given = "wait() for a save that only some ranks asked for"
            do = "call dt.save on all ranks, or wait() after the next optimizer step"
            raise CheckpointError(explain(given, "a save that has begun", do))
        self._done.wait()
        if self._fault:
            self.told = True
            raise CheckpointError(self._fault)

    def copy(self, content: writing.Content | str, into: dict[str, Tensor]) -> writing.Content | str:
        """Make the content independent of the run, in memory of an earlier copy; what is given changes meanwhile."""
        try:
            if isinstance(content, writing.Content):
                steady = [piece for piece in content.pieces if piece.steady]
                before = [(piece.tensor, piece.tensor._version) for piece in steady]
                _copy(steady, into)
                for piece, (tensor, version) in zip(steady, before, strict=True):
                    if tensor._version != version:
                        return _changed(piece.key)
            return content
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.copied.set()

    def run(
        self, asked: Mapping[str, Any], content: writing.Content | str, meet: Callable[[], writing.Channel]
    ) -> None:
        """Carry it out in the present thread."""
        try:
            channel = meet()
            there = place.of(asked["path"])
            name = writing.carry_out(there, content, channel, keep=asked["keep"], private=asked["private"])
            self.path = there.file(name, "")
        except BaseException as error:
            self._fault = str(error) or repr(error)
        self._done.set()


@dataclass
class _State:
    """What saving keeps in this process."""

    last: Saving | None = None
    """The latest save; at most one is under way."""
    promised: dict[str, Saving] = field(default_factory=dict)
    """Saves that are to be carried out later, by path."""
    count: int = 0
    user: dict[tuple[str, bool], dict[str, Any]] = field(default_factory=dict)
    """The user's own objects, by the path they are saved to, and whether that is done by `save_every`."""
    every: _Every | None = None
    due: bool = False
    fed: bool = False
    """Whether batches to train on come from a loader that was given."""
    armed: list[RemovableHandle] = field(default_factory=list)
    """Where they do not: hooks on the next forward."""
    stepped: bool = False
    """Whether an optimizer has stepped since the last batch was handed out."""
    looked: bool = False
    """Whether it was looked for objects that belong into a checkpoint and are not known."""
    copies: dict[str, Tensor] = field(default_factory=dict)
    """Memory of the last copy that was written behind training: used again."""


@dataclass
class _Every:
    """`save_every`."""

    request: str
    steps: int | None
    seconds: float | None
    last_step: int
    last_time: float

    def is_due(self) -> bool:
        """Whether it is time, at this step; for seconds only rank 0's clock counts."""
        if self.steps is not None:
            return here().loop.steps - self.last_step >= self.steps
        return time.monotonic() - self.last_time >= (self.seconds or 0.0)

    def began(self) -> None:
        """One begins now."""
        self.last_step, self.last_time = here().loop.steps, time.monotonic()


_STATE = _State()


def save(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    wait: bool = True,
    keep: int = 2,
    private: bool = True,
) -> Saving:
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
        return _finish(_begin(request, [0]), request)
    if meeting.of(world.loop, _together).ask(request):
        assert _STATE.last is not None
        return _STATE.last
    where = json.loads(request)["path"]
    return _STATE.promised.setdefault(where, Saving(where, promised=True))


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
    every = None if save_every is None else _period(save_every)
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
        atexit.unregister(_drop_timed)
        atexit.register(_drop_timed)
        _STATE.every = _Every(request, steps, seconds, world.loop.steps, time.monotonic())
    return resumed


def _went_on(resumed: Resumed, said: str) -> str:
    if resumed.path is None:
        return f"nothing to resume in {said}: starts from the beginning"
    cursor = RUN.loaders[RUN.fed].cursor if RUN.loaders else None
    inside = "" if cursor is None or cursor.ended else f", after batch {cursor.batch} of its epoch"
    epoch = f", epoch {resumed.epoch}{inside}" if cursor is not None else ""
    return f"resumed from {resumed.path}: step {resumed.step}{epoch}"


def _epoch() -> int:
    if not RUN.loaders:
        return 0
    cursor = RUN.loaders[RUN.fed].cursor
    return cursor.epoch + cursor.ended


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


# When.


def stand(loop: Loop) -> None:
    """Be asked before and after every step."""
    if carry_out_after_step not in loop.after_step:
        loop.after_step.append(carry_out_after_step)
        loop.before_update.append(hold_back)
        loop.after_backward.append(hold_back)
    if loop.comm.world > 1:
        meeting.of(loop, _together)  # from now on, the ranks also meet at exit


def hold_back() -> None:
    """Before a step changes anything: wait until what is saved behind training has been copied."""
    last = _STATE.last
    if last is not None and not last.copied.is_set():
        began = time.monotonic()
        last.copied.wait()
        last.stalled += time.monotonic() - began


def carry_out_after_step(_: Sequence[Member]) -> None:
    """Every rank, after every step: see what is to be saved; it is, when the loop has come round."""
    _tell()
    loop, every = here().loop, _STATE.every
    if every is not None and not _STATE.due and (here().rank == 0 or every.steps is not None) and every.is_due():
        if every.steps is not None or loop.comm.world == 1:
            _STATE.due = True
        elif every.request not in loop.requests:
            loop.requests.append(every.request)
            meeting.of(loop, _together).put_off()
    _STATE.stepped = True
    if not _STATE.fed and not _STATE.armed and (_STATE.due or loop.requested):
        _STATE.armed = [m.register_forward_pre_hook(lambda *_: come_round()) for m in RUN.models]


def come_round() -> None:
    """The next batch is asked for, or a model runs: all that the loop does after the last step is done."""
    if not _STATE.stepped or not torch.is_grad_enabled():  # an evaluation in between
        return
    _STATE.stepped = False
    while _STATE.armed:
        _STATE.armed.pop().remove()
    loop = here().loop
    if loop.comm.world > 1 and loop.requested:
        meeting.of(loop, _together).catch_up()
    if _STATE.due and _STATE.every is not None:
        _STATE.due = False
        _begin(_STATE.every.request, list(range(loop.comm.world)))


def feeds(number: int) -> None:
    """A batch of this loader is handed out to be trained on."""
    if torch.is_grad_enabled():
        _STATE.fed, RUN.fed = True, number


def ends() -> None:
    """A loader has come to the end of its epoch: what is trained on next may come from elsewhere."""
    _STATE.fed = False


def carry_out_put_off() -> None:
    """Carry out now the saves that only some ranks asked for, and end those under way. A group call."""
    if here().size > 1 and RUN.models:
        meeting.of(here().loop, _together).catch_up()
    _settle()
    last, count = _STATE.last, _STATE.count
    _STATE.__init__(last=last, count=count)  # type: ignore[misc]


def _tell() -> None:
    """Say that a save behind training has failed: once, on rank 0."""
    last = _STATE.last
    if last is not None and last.done and last._fault and not last.told:
        last.told = True
        if here().rank == 0:
            record.say(f"a save behind training has failed, training goes on: {last._fault}")


def _settle() -> None:
    """At most one save is under way: wait for it."""
    if _STATE.last is not None:
        _STATE.last._done.wait()
        _tell()


def _at_exit() -> None:
    if record.failed():
        if _STATE.last is not None:  # Python ends badly under a thread that is inside the store
            _STATE.last._done.wait(_SECONDS_TO_END)
        return
    _settle()


def _drop_timed() -> None:
    """At exit: a save that was only due by the clock is not asked for any more."""
    requests, every = here().loop.requests, _STATE.every
    if every is not None and every.request in requests:
        requests.remove(every.request)


# How.


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
    _STATE.user[where, how.get("every", False)] = check_state(state)
    return json.dumps({"path": where, **part, **how})


def _together(request: str) -> None:
    """All ranks write: a group call."""
    _finish(_begin(request, list(range(here().size))), request)


def _finish(saving: Saving, request: str) -> Saving:
    if json.loads(request)["wait"]:
        saving.wait()
    return saving


def _begin(request: str, writers: list[int]) -> Saving:
    """Take the state now, and write it: here, or behind training."""
    _settle()
    asked, world = json.loads(request), here()
    saving = _STATE.last = _STATE.promised.pop(asked["path"], Saving(asked["path"]))
    saving.promised = False
    if _STATE.every is not None and request == _STATE.every.request:
        _STATE.every.began()
    many = len(writers) > 1
    _STATE.count += many
    name = f"checkpoint/{_STATE.count}"
    began = time.monotonic()
    with world.comm.held("save", f"save to {asked['path']}"), torch.inference_mode(False):
        content = _content(asked, writers)
        if asked["wait"]:
            store = (lambda: meeting.of(world.loop, _together).store) if many else None
            saving.copied.set()
            saving.run(asked, content, lambda: writing.Channel(world.rank, writers, store, name))
            saving.stalled = time.monotonic() - began
            return saving
        if isinstance(content, writing.Content):
            # Where the library chose the moment, nothing but a step changes the rest; one process is not watched.
            later = asked.get("every", False) and bool(world.loop.members)
            _copy([piece for piece in content.pieces if not (piece.steady and later)], {} if later else _STATE.copies)
            for piece in content.pieces:
                piece.steady = piece.steady and later
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)

    def behind() -> None:
        copied = saving.copy(content, _STATE.copies)
        store = (lambda: client(10)) if many else None
        saving.run(asked, copied, lambda: writing.Channel(world.rank, writers, store, name))

    threading.Thread(target=behind, name="distributedtorch-save", daemon=True).start()
    saving.stalled = time.monotonic() - began
    return saving


def _content(asked: dict[str, Any], writers: list[int]) -> writing.Content | str:
    """What this rank writes, or why it cannot."""
    try:
        mine = _STATE.user.get((asked["path"], asked.get("every", False)), {})
        if here().rank == writers[0] and "model" not in asked:
            _look_round(mine)
        return collect(asked.get("model"), mine, writers=writers)
    except Exception as error:
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _look_round(state: Mapping[str, Any]) -> None:
    """Say once what will be missing after a resume: schedulers and loss scales that nobody gave, an open window."""
    if any(member.touched_since_step for member in here().loop.members):
        record.say("saved between a backward and its optimizer step: the gradients so far are not in the checkpoint")
    if _STATE.looked:
        return
    _STATE.looked = True
    known = [*RUN.schedulers, *attach.made(), *state.values()]
    for one in known:  # schedulers made of others
        known += getattr(one, "_schedulers", [])
    for one in gc.get_objects():
        kind = type(one)  # not isinstance: asking an object for its class may run code of its own
        ours = issubclass(kind, LRScheduler) and any(getattr(one, "optimizer", None) is o for o in RUN.optimizers)
        scales = issubclass(kind, torch.amp.GradScaler) and one.is_enabled()
        if (ours or scales) and not any(one is other for other in known):
            do = f'give it to dt.distribute, or as state={{"{kind.__name__.lower()}": ...}}'
            record.say(f"a {kind.__name__} of this script is not in the checkpoint: {do}")


def _copy(pieces: Sequence[writing.Piece], into: dict[str, Tensor]) -> None:
    """Give each piece memory of its own; what lies in `into` is used again, and kept for the next time."""
    for piece in pieces:
        there = into.get(piece.name)
        if there is None or there.shape != piece.tensor.shape or there.dtype != piece.tensor.dtype:
            there = into[piece.name] = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device="cpu")
        piece.tensor = there.copy_(piece.tensor)


def _changed(key: str) -> str:
    given = f"{key!r} was changed while it was being copied to be saved behind training"
    do = "change parameters between the optimizer's step and the next batch, or save with wait=True"
    return explain(given, "nothing but optimizer.step() to change it meanwhile", do)


# Finding what to load.


def _find(path: str | os.PathLike[str], model: nn.Module | None, state: dict[str, Any]) -> Stored | None:
    """The newest checkpoint that is whole and fits, the same on all ranks; None where there is none at all.

    Raises:
        CheckpointError: None is whole, or the newest whole one is not of this run.
    """
    world = here()
    _settle()
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
        root, _, last = path.rstrip("/").rpartition("/")
        if FOLDER.fullmatch(last):
            return {"root": root or ".", "names": [last], "exact": True}
        there: Place = place.of(path)
        return {"root": path, "names": there.committed(), "exact": False}
    except Exception as error:
        return {"fault": str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"}


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
        said = str(error) if isinstance(error, CheckpointError) else f"{there.file(folder, '')}: {error!r}"
        return None, {"kind": "damaged", "said": said}
    return stored, {"kind": "good", "said": found.digest}


def _of_all(name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    if here().size == 1:
        return [mine]
    return [json.loads(card) for card in here().comm.bytes_of_all(name, json.dumps(mine).encode())]


def _take_over(found: Stored) -> None:
    """Put a checkpoint into the run; what was asked for before is about another state."""
    try:
        with torch.inference_mode(False):
            found.apply()
    except DistributedTorchError:
        raise
    except (*index._WRONG, RuntimeError) as error:
        where = found.reader.place.file(found.reader.folder, "")
        given = f"{where} is whole, but cannot be taken over ({type(error).__name__}: {error})"
        do = "start again, with another checkpoint: this run's state is partly changed"
        raise CheckpointError(explain(given, "state that dt.save has written", do)) from error
    RUN.seed = torch.initial_seed()
    if _STATE.every is not None:
        _STATE.every.began()
