"""A server at work: a thread that hears workers, keeps to the rules of the board, and answers."""

from __future__ import annotations

import contextlib
import threading

from distributedtorch.serve.board import Board, Refused
from distributedtorch.serve.channel import Doors, Kind, Message, refusal
from distributedtorch.serve.shard import Shard

_MS_BETWEEN_LOOKS = 200


class Desk:
    """One server beside a rank."""

    def __init__(self, shard: Shard, doors: Doors, *, staleness: int | None, ahead: int | None) -> None:
        self.shard, self.doors = shard, doors
        self.board = Board(len(doors.workers), shard.apply, self.give, staleness=staleness, ahead=ahead)
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

    def _run(self) -> None:
        while len(self.gone) < len(self.doors.workers):
            try:
                message = self.doors.hear(_MS_BETWEEN_LOOKS)
                if message is not None:
                    with self.lock:
                        self._answer(message)
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
        elif self.failed is not None:
            self.doors.say(message.worker, self._failure())
            return
        try:
            self._act(message)
        except Refused as error:
            self.doors.say(message.worker, refusal(error))

    def give(self, worker: int) -> None:
        """Send a worker the present version."""
        content = self.shard.give(worker, self.board.version)
        self.doors.say(worker, Message(kind=Kind.STATE, worker=worker, version=self.board.version, content=content))

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
