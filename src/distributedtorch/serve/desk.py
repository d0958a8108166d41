"""A server at work: a thread that hears workers, keeps to the rules of the board, and answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributedtorch.serve.board import Board, Push, Refused
from distributedtorch.serve.channel import Doors, Kind, Message, refusal
from distributedtorch.serve.journal import Journal
from distributedtorch.serve.shard import Shard

_MS_BETWEEN_LOOKS = 200


class Desk:
    """One server beside a rank."""

    def __init__(
        self,
        shard: Shard,
        doors: Doors,
        *,
        staleness: int | None,
        ahead: int | None,
        journal: Journal | None = None,
    ) -> None:
        self.shard, self.doors, self.journal = shard, doors, journal
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

    def refill(self) -> None:
        """Take over what was put into the user's objects."""
        with self.lock:
            self.shard.refill()
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
                if message is not None:
                    with self.lock:
                        self._answer(message)
                        if self.journal is not None and self.journal.full:
                            self.journal.begin(self.board.version, self._state())
            except Exception as error:  # the user's optimizer, or the channel: every worker is to hear of it
                self.failed = error
                for worker in self.doors.names:
                    with contextlib.suppress(Exception):
                        self.doors.say(worker, self._failure())

    def _failure(self) -> Message:
        return refusal(Refused(f"the server has failed: {type(self.failed).__name__}: {self.failed}"))

    def _answer(self, message: Message) -> None:
        if message.kind is Kind.BYE:
            self.gone.add(message.worker)
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
        content = self.shard.give(worker, version)
        self.doors.say(worker, Message(kind=Kind.STATE, worker=worker, step=step, version=version, content=content))

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
        else:
            raise Refused(f"a worker says {message.kind.name}")
