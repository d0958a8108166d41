"""Locks between ranks: one at a time, or many that only read, in the order in which they came.

A lock is one value in the store: the turns of those who hold it and of those who wait, first come first served, changed
by compare-and-set. So nothing is needed of the other ranks' training threads, readers do not overtake a writer, and who
gives up can say which rank holds the lock, since when and at which line. A rank that holds it or comes before, and
gives no sign of life for 10 s, is named too.

What travels: some hundred bytes to the store and back, when a lock is taken, when it is given back, and every 1 to
20 ms while it is waited for. For files and caches that ranks share; not for anything inside a step.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.utils.data import get_worker_info

from distributedtorch.core import where
from distributedtorch.core.errors import LockError, PeerError, UsageError, explain, shown
from distributedtorch.core.plain import heard
from distributedtorch.core.world import here
from distributedtorch.elastic import watch
from distributedtorch.launch import record
from distributedtorch.launch.join import client
from distributedtorch.launch.start import join_world

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_SECONDS_BETWEEN_SIGNS = 2.0
_SECONDS_OF_SILENCE = 10.0
_SECONDS_TO_SAY = 10.0
_EMPTY, _LONGEST = "[]", 1 << 22

_serial = itertools.count()
_mine: set[tuple[int, int, str]] = set()
"""By process, thread and name, the locks that are held or waited for here."""
_stores: dict[int, Store] = {}
"""By process: a connection must not be used on both sides of a fork (data workers)."""


@contextmanager
def lock(name: str, *, read: bool = False, timeout: float = 1800.0) -> Iterator[None]:
    """Hold a lock that all ranks know by its name: `with dt.lock("cache"):`.

    One rank at a time holds it, or any number of them that only read; who asks first has it first. Another thread of
    the same rank waits like another rank. In one process it holds back threads only.

    Args:
        name: Which lock.
        read: Hold it together with others that read.
        timeout: Seconds to wait for it; 0 tries once.

    Raises:
        LockError: It was not to be had in time; says who holds it, since when, and who waits before.
        PeerError: A rank that holds it, or comes before, gives no sign of life.
        UsageError: This thread holds it already, or the arguments cannot be meant.
    """
    _check(name, timeout)
    me = os.getpid(), threading.get_ident(), name
    if me in _mine:
        given = f"dt.lock({name!r}) inside a block that holds it already, on rank {here().rank}"
        needed = "each lock once at a time: a rank would wait for itself"
        raise UsageError(explain(given, needed, "leave the inner one out, or give the outer one another name"))
    world = here() if get_worker_info() is not None else join_world()
    _mine.add(me)
    try:
        with ExitStack() as stack:
            world.comm.count_sent("lock", 0)
            with world.comm.timed("lock"):
                stack.enter_context(Queue(_store(world.size), name, world.rank).turn(read=read, timeout=timeout))
            yield
    finally:
        _mine.discard(me)


def _check(name: str, timeout: float) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(explain(f"dt.lock({name!r})", "a name", 'give every lock a name: dt.lock("cache")'))
    if not timeout >= 0:
        raise UsageError(explain(f"dt.lock({name!r}, timeout={timeout!r})", "seconds, 0 or more", "change timeout="))


def _store(world: int) -> Store:
    """This process's connection to where the locks are."""
    process = os.getpid()
    if process not in _stores:
        _stores[process] = client() if world > 1 else HashStore()
    return _stores[process]


@dataclass(frozen=True)
class Turn:
    """A place in the queue of a lock."""

    rank: int
    mark: str
    """No other turn has it."""
    reads: bool
    where: str
    """The user's line."""
    since: str = ""
    """When it came to hold the lock, by its own clock; empty while it waits."""


class Queue:
    """Who holds a lock and who waits for it."""

    def __init__(self, store: Store, name: str, rank: int) -> None:
        self.store, self.name, self.rank = store, name, rank

    @contextmanager
    def turn(self, *, read: bool, timeout: float) -> Iterator[None]:
        """Wait for the lock, and hold it for a block; whatever happens, this turn is over at the end."""
        mark = f"{self.rank}.{os.getpid()}.{next(_serial)}"
        mine = Turn(self.rank, mark, read, where.of_frame(sys._getframe()))
        try:
            turns = self._change(lambda turns: _dated([*turns, mine], mine))
            if before(turns, mine):
                self._wait(mine, turns, timeout)
                self._change(lambda turns: _dated(turns, mine))
            yield
        finally:
            self._change(lambda turns: [one for one in turns if one.mark != mark])

    def turns(self) -> list[Turn]:
        """All of them, in order."""
        return _decode(self._text())

    def _wait(self, mine: Turn, turns: list[Turn], timeout: float) -> None:
        began, pause, said = time.monotonic(), _SHORTEST_PAUSE, False
        signs = _Signs(self.store, self.rank)
        while ahead := before(turns, mine):
            waited = time.monotonic() - began
            if waited >= timeout:
                raise LockError(self._late(mine, _story(turns, ahead), waited))
            silent = signs.silent([turn.rank for turn in ahead])
            if silent is not None:
                raise self._silent(_story(turns, ahead), silent)
            if waited > _SECONDS_TO_SAY and not said:
                said = True
                record.say(f"rank {self.rank} has waited {waited:.0f} s for lock {self.name!r}: {_story(turns, ahead)}")
            time.sleep(min(pause, timeout - waited))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            turns = self.turns()

    def _text(self) -> str:
        """The value, which is made where there is none: one question, and nobody waits for the answer."""
        return self.store.compare_set(self._key, "", _EMPTY).decode()

    def _change(self, act: Callable[[list[Turn]], list[Turn]]) -> list[Turn]:
        """Change the turns as if nobody else did; only this rank adds, marks or takes out a turn of its own."""
        present = self._text()
        while True:
            turns = act(_decode(present))
            wanted = json.dumps([astuple(one) for one in turns])
            found = self.store.compare_set(self._key, present, wanted).decode()
            if found == wanted:
                return turns
            present = found

    @property
    def _key(self) -> str:
        return f"lock/{self.name}"

    def _late(self, mine: Turn, story: str, waited: float) -> str:
        what = "to read under" if mine.reads else "for"
        return explain(
            f"rank {self.rank} has waited {waited:.1f} s {what} lock {self.name!r} at {mine.where}: {story}",
            "the ranks before this one to leave their `with dt.lock` blocks",
            "look at the lines named; do less while the lock is held, or give more time by timeout=",
        )

    def _silent(self, story: str, rank: int) -> PeerError:
        given = f"lock {self.name!r} is not to be had: {story}; rank {rank} gives no sign of life"
        do = f"look at the output of rank {rank}: it was killed or stopped; what the lock guards may be half done"
        error = PeerError(explain(given, "every rank to give its locks back", do))
        error.rank = rank
        return error


def before(turns: Sequence[Turn], mine: Turn) -> list[Turn]:
    """The turns that must end before this one holds the lock: all earlier ones, but readers do not wait for readers."""
    place = next(number for number, turn in enumerate(turns) if turn.mark == mine.mark)
    return [turn for turn in turns[:place] if not (turn.reads and mine.reads)]


class _Signs:
    """Signs of life of other ranks, looked for now and then."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        """By rank, its last sign, and when that was new here."""

    def silent(self, ranks: Sequence[int]) -> int | None:
        """One of these ranks that has given none for long."""
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_SIGNS:
            return None
        self._looked = now
        for rank in set(ranks) - {self.rank}:
            count = watch.beats(self.store, rank)
            known, since = self._seen.get(rank, (-1, now))
            self._seen[rank] = (known, since) if count == known else (count, now)
            if now - self._seen[rank][1] > _SECONDS_OF_SILENCE:
                return rank
        return None


def _dated(turns: list[Turn], mine: Turn) -> list[Turn]:
    """The same turns; this one says since when, if it holds the lock."""
    if before(turns, mine):
        return turns
    return [replace(one, since=time.strftime("%H:%M:%S")) if one.mark == mine.mark else one for one in turns]


def _story(turns: Sequence[Turn], ahead: Sequence[Turn]) -> str:
    """Who holds the lock, and who waits for it before."""
    holding = [turn for turn in ahead if not before(turns, turn)]
    said = [f"rank {turn.rank} holds it since {turn.since or 'now'} ({turn.where})" for turn in holding]
    waiting = [f"rank {turn.rank} ({turn.where})" for turn in ahead if turn not in holding]
    return shown("; ".join(said + ([f"waiting before it: {', '.join(waiting)}"] if waiting else [])))


def _decode(text: str) -> list[Turn]:
    return [Turn(*fields) for fields in heard(text.encode(), _LONGEST)]
