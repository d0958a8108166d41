"""Saves under way: when they are due, and how they are carried out, here or behind training.

At most one is under way. What is saved by itself is saved when the loop comes round or is left, never inside a window
of accumulated batches; what only an optimizer's step changes is then copied behind the next forward and backward.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint import channel, meeting, place, writing
from distributedtorch.checkpoint.channel import Channel
from distributedtorch.checkpoint.every import Every
from distributedtorch.contents import batches_of, collect, forgotten
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.override import hooked
from distributedtorch.core.step import Loop, Member
from distributedtorch.core.world import here
from distributedtorch.data.loader import Loader
from distributedtorch.launch import record
from distributedtorch.launch.join import client
from distributedtorch.run import RUN

_SECONDS_TO_END = 2.0
_LEFT = "the loop was left by an error: what follows a step was perhaps not done"
_SECONDS_TO_FAIL = 0.5
"""How long an error that has left the loop may take to the top of the script."""


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

    def copy(
        self, content: writing.Content | str, before: Sequence[tuple[Tensor, int]], into: dict[str, Tensor]
    ) -> writing.Content | str:
        """Make the content independent of the run, in memory of an earlier copy; what is given changes meanwhile.

        `before` has the steady tensors with the versions that they had when the save began.
        """
        try:
            if isinstance(content, writing.Content):
                steady = [piece for piece in content.pieces if piece.steady]
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
        self, asked: Mapping[str, Any], content: Callable[[], writing.Content | str], meet: Callable[[], Channel]
    ) -> None:
        """Carry it out in the present thread; the other ranks see that this one is at it while it gives its content."""
        try:
            there = place.of(asked["path"])
            with contextlib.closing(meet()) as channel:
                name = writing.carry_out(there, content(), channel, keep=asked["keep"], private=asked["private"])
            self.path = there.file(name, "")
        except BaseException as error:
            self._fault = str(error) or repr(error)
        self.copied.set()
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
    every: Every | None = None
    due: bool = False
    fed: bool = False
    """Whether batches to train on come from a loader that was given."""
    armed: list[Callable[[], None]] = field(default_factory=list)
    """Where they do not: hooks on the next forward."""
    stepped: bool = False
    """Whether an optimizer has stepped since the last batch was handed out."""
    looked: bool = False
    """Whether it was looked for objects that belong into a checkpoint and are not known."""
    ending: threading.Event = field(default_factory=threading.Event)
    """Set at exit."""
    copies: dict[str, Tensor] = field(default_factory=dict)
    """Memory of the last copy that was written behind training: used again."""


STATE = _State()


def stand(loop: Loop) -> None:
    """Be asked before and after every step."""
    if carry_out_after_step not in loop.after_step:
        loop.after_step.append(carry_out_after_step)
        loop.before_update.append(before_step)
        loop.after_backward.append(hold_back)
    if loop.comm.world > 1:
        meeting.of(loop, together)  # from now on, the ranks also meet at exit
    atexit.unregister(leave)
    atexit.register(leave)


def before_step() -> None:
    """Before an optimizer changes anything."""
    hold_back()
    fed = fed_by()
    if fed is not None:
        RUN.pace.check(fed.cursor, batches_of(fed)[1])


def fed_by() -> Loader | None:
    """The loader that the last batch to train on came from, where it is known here."""
    return RUN.loaders[RUN.fed] if RUN.fed < len(RUN.loaders) else None


def hold_back() -> None:
    """Before a step changes anything: wait until what is saved behind training has been copied."""
    last = STATE.last
    if last is not None and not last.copied.is_set():
        began = time.monotonic()
        last.copied.wait()
        last.stalled += time.monotonic() - began


def carry_out_after_step(_: Sequence[Member]) -> None:
    """Every rank, after every step: see what is to be saved; it is, when the loop has come round."""
    tell()
    loop, every = here().loop, STATE.every
    if every is not None and not STATE.due and (here().rank == 0 or every.steps is not None) and every.is_due():
        if every.steps is not None or loop.comm.world == 1:
            STATE.due = True
        elif every.request not in loop.requests:
            loop.requests.append(every.request)
            meeting.of(loop, together).put_off()
    STATE.stepped = True
    fed = fed_by()
    if fed is not None:
        RUN.pace.stepped(fed.cursor)
    if not STATE.fed and not STATE.armed and (STATE.due or loop.requested):
        STATE.armed = [hooked(m, m.register_forward_pre_hook(lambda *_: come_round())) for m in RUN.models]


def come_round() -> None:
    """The next batch is asked for, or a model runs: all that the loop does after the last step is done."""
    if not STATE.stepped or not torch.is_grad_enabled():  # an evaluation in between
        return
    STATE.stepped = False
    while STATE.armed:
        STATE.armed.pop()()
    loop = here().loop
    if loop.comm.world > 1 and loop.requested:
        meeting.of(loop, together).catch_up()
    _save_due()


def _save_due(*, left: bool = False) -> None:
    if STATE.due and STATE.every is not None:
        STATE.due = False
        begin(STATE.every.request, list(range(here().loop.comm.world)), left=left)


def feeds(number: int) -> None:
    """A batch of this loader is handed out to be trained on."""
    if torch.is_grad_enabled():
        STATE.fed, RUN.fed = True, number


def ends() -> None:
    """A loader has come to the end of its epoch, or the loop was left before that: it may not come round any more."""
    STATE.fed = False
    fed = fed_by()
    if fed is not None and fed.cursor.ended and not record.failed():
        RUN.pace.ended(fed.cursor)
    ours = threading.current_thread() is threading.main_thread()  # not the collector's, in a thread of the library
    if ours and STATE.stepped and torch.is_grad_enabled() and not STATE.ending.is_set():
        _save_due(left=True)


def carry_out_put_off() -> None:
    """Carry out now the saves that only some ranks asked for, and end those under way. A group call."""
    if here().size > 1 and RUN.models:
        meeting.of(here().loop, together).catch_up()
    settle()
    last, count = STATE.last, STATE.count
    STATE.__init__(last=last, count=count)  # type: ignore[misc]


def tell() -> None:
    """Say that a save behind training has failed: once, on rank 0."""
    last = STATE.last
    if last is not None and last.done and last._fault and not last.told:
        last.told = True
        if here().rank == 0:
            record.say(f"a save behind training has failed, training goes on: {last._fault}")


def settle() -> None:
    """At most one save is under way: wait for it."""
    if STATE.last is not None:
        STATE.last._done.wait()
        tell()


def leave() -> None:
    """At exit: what is due is saved, though the loop neither came round nor ended, and nothing is left under way."""
    STATE.ending.set()
    if record.failed():
        if STATE.last is not None:  # Python ends badly under a thread that is inside the store
            STATE.last._done.wait(_SECONDS_TO_END)
        return
    if STATE.stepped:
        _save_due()
    settle()


def drop_timed() -> None:
    """At exit: a save that was only due by the clock is not asked for any more."""
    requests, every = here().loop.requests, STATE.every
    if every is not None and every.request in requests:
        requests.remove(every.request)


def together(request: str) -> None:
    """All ranks write: a group call."""
    finish(begin(request, list(range(here().size))), request)


def finish(saving: Saving, request: str) -> Saving:
    if json.loads(request)["wait"]:
        saving.wait()
    return saving


def begin(request: str, writers: list[int], *, left: bool = False) -> Saving:
    """Take the state now, and write it: here, or behind training. `left`: the loop was, perhaps by an error."""
    settle()
    asked, world = json.loads(request), here()
    saving = STATE.last = STATE.promised.pop(asked["path"], Saving(asked["path"]))
    saving.promised = False
    if STATE.every is not None and request == STATE.every.request:
        STATE.every.began()
    many = len(writers) > 1
    STATE.count += many
    name = f"checkpoint/{STATE.count}"
    began = time.monotonic()
    with world.comm.held("save", f"save to {asked['path']}"), torch.inference_mode(False):
        present = (lambda: meeting.of(world.loop, together).store) if many else None
        content = _content(asked, writers)
        if asked["wait"]:
            saving.copied.set()
            saving.run(asked, lambda: content, lambda: Channel(world.rank, writers, present, name))
            saving.stalled = time.monotonic() - began
            return saving
        if isinstance(content, writing.Content):
            # Where the library chose the moment, nothing but a step changes the rest; one process is not watched.
            later = asked.get("every", False) and bool(world.loop.members)
            _copy([piece for piece in content.pieces if not (piece.steady and later)], {} if later else STATE.copies)
            for piece in content.pieces:
                piece.steady = piece.steady and later
    pieces = content.pieces if isinstance(content, writing.Content) else []
    before = [(piece.tensor, piece.tensor._version) for piece in pieces if piece.steady]

    def copied() -> writing.Content | str:
        found = saving.copy(content, before, STATE.copies)
        return _LEFT if left and _fails() else found

    def behind() -> None:
        store = (lambda: client(10)) if many else None
        saving.run(asked, copied, lambda: Channel(world.rank, writers, store, name))

    if present is not None:
        channel.begins(present, name, world.rank)
    threading.Thread(target=behind, name="distributedtorch-save", daemon=True).start()
    saving.stalled = time.monotonic() - began
    return saving


def _fails() -> bool:
    """Whether what has left the loop was an error."""
    STATE.ending.wait(_SECONDS_TO_FAIL)
    return record.failed()


def _content(asked: dict[str, Any], writers: list[int]) -> writing.Content | str:
    """What this rank writes, or why it cannot."""
    try:
        mine = STATE.user.get((asked["path"], asked.get("every", False)), {})
        if here().rank == writers[0] and "model" not in asked:
            _look_round(mine)
        return collect(asked.get("model"), mine, writers=writers)
    except Exception as error:
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _look_round(state: Mapping[str, Any]) -> None:
    """Say once what will be missing after a resume: schedulers and loss scales that nobody gave, an open window."""
    if any(member.touched_since_step for member in here().loop.members):
        record.say("saved between a backward and its optimizer step: the gradients so far are not in the checkpoint")
    if STATE.looked:
        return
    STATE.looked = True
    for kind in forgotten(state.values()):
        do = f'give it to dt.distribute, or as state={{"{kind.lower()}": ...}}'
        record.say(f"a {kind} of this script is not in the checkpoint: {do}")


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
