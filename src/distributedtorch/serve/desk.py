"""A server at work: a thread that hears workers, keeps to the rules of the board, and answers.

Beside a rank, or in a process of its own, which has what it serves from a worker (`whole`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from distributedtorch.serve.board import Board, Push, Refused
from distributedtorch.serve.channel import Doors, Kind, Message, refusal
from distributedtorch.serve.journal import Journal
from distributedtorch.serve.shard import Shard
from distributedtorch.serve.whole import PIECE, Coming, packed

_MS_BETWEEN_LOOKS = 200


class Desk:
    """One server."""

    def __init__(
        self,
        shard: Shard,
        doors: Doors,
        *,
        staleness: int | None,
        ahead: int | None,
        journal: Journal | None = None,
        owner: int = 0,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.shard, self.doors, self.journal, self.on_failure = shard, doors, journal, on_failure
        self.owner = owner
        """The worker that may fill it, and ask for all that it has, where it has a process of its own."""
        self.coming: Coming | None = None
        """What it is to have, as far as it has come."""
        self.filled = -1
        """The request that brought the last piece."""
        self.asked: Tensor | None = None
        """What was asked for, until the last piece has gone."""
        self.board = Board(len(doors.workers), self._apply, self.give, staleness=staleness, ahead=ahead)
        self.restored = journal is not None and self._restore(journal)
        """Whether it goes on from what an earlier start of the job has applied."""
        self.gone: set[int] = set()
        self.failed: Exception | None = None
        self.lock = threading.Lock()
        """Held while something changes."""
        self.thread = threading.Thread(target=self._run, name="distributedtorch-server", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End when every worker has said that it is done."""
        self.thread.join()
        self.doors.close()
        if self.journal is not None:
            self.journal.close()

    def refill(self, *, state: bool) -> None:
        """Take over what was put into the user's objects: values and, if so, optimizer state."""
        with self.lock:
            self.shard.refill(state=state)
            self._begin_journal()

    def _begin_journal(self) -> None:
        if self.journal is not None:
            self.journal.begin(self.board.version, self._state())

    def _restore(self, journal: Journal) -> bool:
        found = journal.found()
        if found is not None:
            state, rounds = found
            self.shard.take_state(state["shard"])
            self.board.version, self.board.taken = state["version"], dict(state["taken"])
            for one in rounds:
                pushes = [replace(push, content=self.shard.reread(push.content)) for push in one.pushes]
                self.shard.apply(pushes, one.options)
                self.board.applied(pushes)
        journal.begin(self.board.version, self._state())
        return self.board.version > 0  # before the first push, what is loaded again is what there was

    def _state(self) -> dict[str, Any]:
        return {"version": self.board.version, "taken": self.board.taken, "shard": self.shard.state()}

    def _apply(self, pushes: Sequence[Push]) -> None:
        pushes = [self.shard.compensated(push) for push in pushes]
        self.shard.follow(pushes)
        if self.journal is None:
            self.shard.apply(pushes)
        else:
            options = self.shard.options()  # once: a scheduler may change them meanwhile
            written = [replace(push, content=self.shard.written(push.content)) for push in pushes]
            self.journal.write(written, options)
            self.shard.apply(pushes, options)

    def _run(self) -> None:
        while len(self.gone) < len(self.doors.workers):
            try:
                message = self.doors.hear(_MS_BETWEEN_LOOKS)
                if message is None:
                    self.doors.require_anybody()
            except Exception as error:  # nobody is there, or nobody can be heard
                return self._fail(error)
            try:
                if message is not None:
                    with self.lock:
                        self._answer(message)
                        if self.journal is not None and self.journal.full:
                            self._begin_journal()
            except Exception as error:  # the user's optimizer, or the disk
                self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        """Every worker is to hear of it, once this process has said it."""
        if self.failed is None:
            self.failed = error
            self.on_failure(error)
        for worker in self.doors.names:
            with contextlib.suppress(Exception):
                self.doors.say(worker, self._failure())

    def _failure(self) -> Message:
        return refusal(Refused(f"the server has failed: {type(self.failed).__name__}: {self.failed}"))

    def _answer(self, message: Message) -> None:
        if message.kind is Kind.BYE:
            self.gone.add(message.worker)
            self._say(message.worker, -1)  # it waits for that, and what it has pulled is given back below
        if self.failed is not None:
            if message.kind is not Kind.BYE:
                self.doors.say(message.worker, self._failure())
            return
        try:
            self._act(message)
        except Refused as error:
            self.doors.say(message.worker, refusal(error))

    def give(self, worker: int) -> None:
        """Send a worker the present version."""
        step, version = self.board.taken[worker], self.board.version
        self._say(worker, step, self.shard.give(worker, version))

    def _say(self, worker: int, step: int, content: Tensor | None = None) -> None:
        waiting, version = len(self.board.waiting), self.board.version
        message = Message(kind=Kind.STATE, worker=worker, step=step, version=version, waiting=waiting, content=content)
        self.doors.say(worker, message)

    def _fill(self, message: Message) -> None:
        """A piece of what this server is to have."""
        if message.serial == self.filled:  # again: the answer was lost
            return self._say(message.worker, -1)
        if self.board.waiting:
            raise Refused(f"a server is filled while {len(self.board.waiting)} pushes wait")
        if message.version == 0:
            if not 0 < message.step <= self.shard.most_filled:
                raise Refused(f"{message.step} bytes for a server, at most {self.shard.most_filled} allowed")
            self.coming = Coming(message.step)
        if self.coming is None or message.content is None:
            raise Refused("a piece of nothing")
        self.coming.add(message.version, message.content)
        if self.coming.complete:
            given, self.coming = self.coming, None
            with _refusing():
                self.shard.take_over(given.value())
            self.filled = message.serial
            self._begin_journal()
        return self._say(message.worker, -1)

    def _tell(self, message: Message) -> None:
        """A piece of what this server keeps beside parameters."""
        at = message.step
        if at == 0 or self.asked is None:
            with _refusing():
                self.asked = packed(self.shard.whole())
        piece, total = self.asked[at : at + PIECE], self.asked.numel()
        if at + PIECE >= total:
            self.asked = None
        self._say(message.worker, total, piece)

    def _act(self, message: Message) -> None:
        board, worker = self.board, message.worker
        if message.kind is Kind.PULL:
            self.shard.told(worker, message.version)
            board.pull(worker)
        elif message.kind is Kind.PUSH:
            if message.content is None:
                raise Refused("a push without gradients")
            brought = self.shard.read(worker, message.step, message.content)
            self.shard.told(worker, message.version)
            board.push(worker, message.step, brought)
        elif message.kind in (Kind.LEAVE, Kind.BYE):
            board.leave(worker, for_good=message.kind is Kind.BYE)
        elif message.kind in (Kind.FILL, Kind.ASK) and self.shard.terms.apart and worker == self.owner:
            (self._fill if message.kind is Kind.FILL else self._tell)(message)
        else:
            raise Refused(f"worker {worker} says {message.kind.name}")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What is wrong with what a worker gives or asks for is said to it, and the server goes on."""
    try:
        yield
    except Exception as error:
        raise Refused(str(error) or type(error).__name__) from error
