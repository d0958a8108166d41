"""When a push may be applied, and who is answered: the rules of a parameter server, without sockets and tensors.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013 (`ahead`).

A worker pulls, computes, and pushes; the answer to a push is the next pull. The staleness of a push is the number of
versions applied between the pull it was computed from and the push itself. Before a version is applied every pull that
is out is looked at: a push that would put one of them past the bound waits until that one has been pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Push:
    """One worker's gradients of one step, or what it changed."""

    worker: int
    step: int
    pulled: int
    """The version that they were computed from."""
    content: Any
    late: int = 0
    """Versions applied since that one when this is applied, waiting included."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a server's history."""

    kind: str
    """`pull`, `push` (came), `apply`, `leave`."""
    worker: int
    step: int
    version: int
    """After the event."""


class Refused(Exception):
    """A message that breaks the rules; the text goes to who sent it."""


class Board:
    """Who has pulled what, which pushes wait, and which may be applied."""

    def __init__(
        self,
        workers: int,
        apply: Callable[[Sequence[Push]], None],
        answer: Callable[[int], None],
        *,
        staleness: int | None = None,
        ahead: int | None = None,
        note: Callable[[Event], None] | None = None,
    ) -> None:
        self.apply, self.answer, self.staleness, self.ahead, self.note = apply, answer, staleness, ahead, note
        self.version = 0
        self.out: dict[int, int] = {}
        """By worker the version it has pulled and not pushed from yet."""
        self.present = set(range(workers))
        """Workers that have not left for good."""
        self.away: set[int] = set()
        """Workers that have given their pull back and not pulled again."""
        self.taken = dict.fromkeys(range(workers), -1)
        """By worker the last step of it that was applied."""
        self.waiting: list[Push] = []
        self.held: list[int] = []
        """Workers whose answer waits, because they are too many steps ahead."""
        self.came: dict[int, int] = {}
        """How many pushes of each staleness."""

    def pull(self, worker: int) -> None:
        """A worker asks for the present version."""
        if any(push.worker == worker for push in self.waiting):
            raise Refused(f"worker {worker} pulls while its push waits")
        self.away.discard(worker)
        self._answer([worker])

    def push(self, worker: int, step: int, content: Any) -> None:
        """A worker brings gradients. The same step again counts once."""
        if step <= self.taken[worker]:
            return self._answer([worker])
        if any(push.worker == worker for push in self.waiting):
            return None
        if worker not in self.out:
            raise Refused(f"worker {worker} pushes step {step} without a pull")
        self._say("push", worker, step)
        self.waiting.append(Push(worker=worker, step=step, pulled=self.out.pop(worker), content=content))
        late = self.version - self.waiting[-1].pulled  # what it is now: waiting does not add to it
        self.came[late] = self.came.get(late, 0) + 1
        return self._drain()

    def leave(self, worker: int, *, for_good: bool = False) -> None:
        """A worker gives back what it has pulled: it will pull again, or never."""
        self._say("leave", worker, -1)
        self.out.pop(worker, None)
        self.away.add(worker)
        self.present -= {worker} if for_good else set()
        self._drain()

    def _may_apply(self) -> bool:
        if self.staleness is None:
            return True
        if self.staleness == 0:
            return {push.worker for push in self.waiting} >= self.present
        return all(self.version + 1 - pulled <= self.staleness for pulled in self.out.values())

    def _drain(self) -> None:
        """Apply what may be."""
        while self.waiting and self._may_apply():
            count = len(self.waiting) if self.staleness == 0 else 1
            pushes, self.waiting = self.waiting[:count], self.waiting[count:]
            pushes.sort(key=lambda push: push.worker)
            self.apply([replace(push, late=self.version - push.pulled) for push in pushes])
            self.applied(pushes)
            self._answer([push.worker for push in pushes])
        self._answer([])

    def applied(self, pushes: Sequence[Push]) -> None:
        """A version has been made of some pushes."""
        self.version += 1
        for push in pushes:
            self.taken[push.worker] = push.step
            self._say("apply", push.worker, push.step)

    def _answer(self, workers: list[int]) -> None:
        """Answer at once, or when the slowest has come nearer."""
        self.held += [worker for worker in workers if worker not in self.held]
        if self.ahead is None:
            ready, self.held = self.held, []
        else:
            slowest = min((self.taken[worker] for worker in self.present - self.away), default=0)
            ready = [worker for worker in self.held if self.taken[worker] - slowest <= self.ahead]
            self.held = [worker for worker in self.held if worker not in ready]
        for worker in ready:
            self.out[worker] = self.version
            self._say("pull", worker, self.taken[worker])
            self.answer(worker)

    def _say(self, kind: str, worker: int, step: int) -> None:
        if self.note is not None:
            self.note(Event(kind=kind, worker=worker, step=step, version=self.version))
