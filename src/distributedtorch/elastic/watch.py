"""The watch: one thread per rank that says within seconds who waits for whom, and where.

Once a second each rank puts its status (the exchange it waits in, its step, its line of code) into the store: a few
hundred bytes through a connection of its own. A rank that has waited 3 s reads the others' statuses. If every rank of
the exchange waits, two of them in different ones of the same group, and three beats in a row show no change, they wait
for each other for ever: all of them end, and the message names two ranks, both exchanges and both lines. If a rank
waits in no exchange, or in one of another group (which may only be slow), it is late: that is said after 8 s, by the
lowest rank that waits there, and at most once a minute. Durations are each reader's own; clocks are never compared.

Not for speed (a rank slower than the others but moving is not named) and not for hosts that vanish (the exchange's own
connection or timeout tells).
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core import where
from distributedtorch.core.errors import DesyncError, DistributedTorchError, shown
from distributedtorch.core.plain import heard

_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_SUSPECT = 3.0
_SECONDS_TO_REPORT = 8.0
_SECONDS_TO_REPEAT = 60.0
_SECONDS_TO_AGREE = 3.0
_SECONDS_STALE = 4.0
_SECONDS_TO_STOP = 2.0
_BEATS_TO_BE_SURE = 3
_VERDICT = "watch/verdict"
_LONGEST_BEAT, _LONGEST_VERDICT = 1 << 16, 1 << 12


@dataclass(frozen=True, kw_only=True)
class Status:
    """What this rank's training thread is doing."""

    exchange: str | None
    """The exchange it waits in, by its logical name ("gradients/0/3 #17"); None: it waits for nobody."""
    where: str
    """The user's line that led there ("train.py:33")."""
    since: float | None
    """Since when it waits there (monotonic)."""
    step: int
    """The step it is at."""
    count: int
    """How many exchanges it has begun."""
    ranks: tuple[int, ...] = ()
    """Who takes part in that exchange; empty: all."""


class Member(Protocol):
    """Who this rank is."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class _Beat:
    """A status as published."""

    number: int
    """Counts this rank's beats, so that a reader can tell a new one from an old one."""
    exchange: str | None
    where: str
    waited: float
    """Seconds in that exchange, by the publisher's clock."""
    step: int
    count: int
    ranks: tuple[int, ...]
    line: str
    """The line the main thread is at."""


@dataclass
class _Seen:
    """What a reader knows of another rank."""

    beat: _Beat
    fresh: float
    """When this beat was first read (the reader's clock)."""
    steady: int = 1
    """How many new beats in a row have shown the same exchange and count."""


def start(
    place: Member,
    store_factory: Callable[[], Store],
    status: Callable[[], Status],
    fail: Callable[[str], NoReturn] | None = None,
    say: Callable[[str], None] | None = None,
) -> Callable[[], None]:
    """Start the watch of this rank; the result stops it.

    Args:
        place: This rank and its world.
        store_factory: Opens a connection to the common store that no other thread uses.
        status: What the training thread does now; called from the watch's thread, so it must only read.
        fail: Ends this process with a message; by default it prints and exits with code 1.
        say: Prints one line where the user looks; by default on stderr.
    """
    watch = _Watch(place, store_factory, status, fail or _end, say or _say)
    thread = threading.Thread(target=watch.run, name="distributedtorch-watch", daemon=True)
    thread.start()

    def stop() -> None:
        watch.stopped.set()
        thread.join(_SECONDS_TO_STOP)

    atexit.register(stop)  # a thread inside the store while Python shuts down would abort the process
    return stop


class _Watch:
    """The state of one rank's watch."""

    def __init__(
        self,
        place: Member,
        store_factory: Callable[[], Store],
        status: Callable[[], Status],
        fail: Callable[[str], NoReturn],
        say: Callable[[str], None],
    ) -> None:
        self.place, self.store_factory, self.status, self.fail, self.say = place, store_factory, status, fail, say
        self.stopped = threading.Event()
        self.seen: dict[int, _Seen] = {}
        self.said = -_SECONDS_TO_REPEAT
        self.number = 0

    def run(self) -> None:
        """Beat until stopped, or until the store is gone: then others say why."""
        try:
            store = self.store_factory()
            store.set_timeout(timedelta(seconds=10))
            while not self.stopped.wait(_SECONDS_BETWEEN_BEATS):
                self._beat(store)
        except Exception:
            return

    def _beat(self, store: Store) -> None:
        mine = self._own()
        store.set(f"watch/{self.place.rank}", _encode(mine))
        if store.check([_VERDICT]):
            self._agree(store)
        if mine.exchange is None or mine.waited <= _SECONDS_TO_SUSPECT:
            self.seen.clear()
            return
        self._read(store)
        members = [rank for rank in mine.ranks or range(self.place.world) if rank != self.place.rank]
        others = {rank: self.seen[rank] for rank in members if rank in self.seen}
        text = mismatch(self.place.rank, mine, {rank: seen.beat for rank, seen in others.items()})
        if text and len(others) == len(members) and all(self._is_stuck(seen) for seen in others.values()):
            store.compare_set(_VERDICT, "", text)
            self._agree(store)
        elif mine.waited > _SECONDS_TO_REPORT:
            self._report(mine, others, members)

    def _own(self) -> _Beat:
        status = self.status()
        self.number += 1
        return _Beat(
            number=self.number,
            exchange=status.exchange,
            where=status.where,
            waited=0.0 if status.since is None else time.monotonic() - status.since,
            step=status.step,
            count=status.count,
            ranks=status.ranks,
            line=where.of_main_thread(),
        )

    def _read(self, store: Store) -> None:
        """Take in what the others have published."""
        ranks = [rank for rank in range(self.place.world) if rank != self.place.rank]
        there = [rank for rank in ranks if store.check([f"watch/{rank}"])]
        now = time.monotonic()
        for rank in there:
            beat, before = _heard(store, rank), self.seen.get(rank)
            if beat is None:
                continue
            if before is None:
                self.seen[rank] = _Seen(beat, now)
            elif beat.number != before.beat.number:
                same = (beat.exchange, beat.count) == (before.beat.exchange, before.beat.count)
                self.seen[rank] = _Seen(beat, now, before.steady + 1 if same else 1)

    def _is_stuck(self, seen: _Seen) -> bool:
        """Whether that rank has waited long in one exchange, by several beats, the last one new."""
        if seen.beat.exchange is None:
            return False
        steady = seen.beat.waited > _SECONDS_TO_SUSPECT and seen.steady >= _BEATS_TO_BE_SURE
        return steady and self._answers(seen, time.monotonic())

    def _agree(self, store: Store) -> None:
        """End with the others: the first to leave would take the store's view of it from them."""
        try:
            text = shown(store.get(_VERDICT)[:_LONGEST_VERDICT].decode(errors="replace"))
        except DistributedTorchError:
            return  # no rank of this job has said that
        store.add("watch/agreed", 1)
        deadline = time.monotonic() + _SECONDS_TO_AGREE
        while store.add("watch/agreed", 0) < self.place.world and time.monotonic() < deadline:
            time.sleep(0.05)
        self.fail(text)

    def _report(self, mine: _Beat, others: Mapping[int, _Seen], members: Sequence[int]) -> None:
        """Name the late ranks, if this is the rank to do so."""
        now = time.monotonic()
        here = [rank for rank, seen in others.items() if seen.beat.ranks == mine.ranks]
        waiting = [rank for rank in here if others[rank].beat.exchange is not None]
        late = [rank for rank in members if rank not in waiting or not self._answers(others[rank], now)]
        if not late or now - self.said < _SECONDS_TO_REPEAT or any(rank < self.place.rank for rank in waiting):
            return
        self.said = now
        for rank in late:
            seen = others.get(rank)
            place = _whereabouts(seen.beat if seen else None, seen is None or self._answers(seen, now))
            self.say(
                f'rank {rank} has not come to "{mine.exchange}" (step {mine.step}) for {mine.waited:.0f} s: {place}'
            )

    def _answers(self, seen: _Seen, now: float) -> bool:
        return now - seen.fresh < _SECONDS_STALE


def beats(store: Store, rank: int) -> int:
    """How often a rank has given a sign of life; it does so every second while its process runs."""
    beat = _heard(store, rank) if store.check([f"watch/{rank}"]) else None
    return 0 if beat is None else beat.number


def mismatch(rank: int, mine: _Beat, others: Mapping[int, _Beat]) -> str:
    """The message for ranks of one group that wait in different exchanges; empty where they do not."""
    for other, beat in sorted(others.items()):
        if beat.exchange is not None and beat.exchange != mine.exchange and beat.ranks == mine.ranks:
            (a, one), (b, two) = sorted([(rank, mine), (other, beat)])
            return (
                f'rank {a} waits in "{one.exchange}" (step {one.step}) at {one.where}, while '
                f'rank {b} waits in "{two.exchange}" (step {two.step}) at {two.where}: neither can go on\n'
                "  needed: every rank to make the same calls in the same order\n"
                "  do: take the call out of the branch that only some ranks run, or make all ranks run it"
            )
    return ""


def _whereabouts(beat: _Beat | None, answers: bool) -> str:
    if beat is None:
        return "nothing has been heard of it"
    last = f"at {beat.line}" if beat.line else "in no known line"
    if answers and beat.exchange is not None:
        among = "ranks " + ", ".join(map(str, beat.ranks)) if beat.ranks else "all ranks"
        return f'it waits in "{beat.exchange}" with {among}, {last}'
    return f"it is {last}" if answers else f"its process does not answer (stopped, or held in C code), last seen {last}"


def _encode(beat: _Beat) -> str:
    return json.dumps({**beat.__dict__, "ranks": list(beat.ranks)})


def _heard(store: Store, rank: int) -> _Beat | None:
    """A rank's last beat; None: nothing that a rank says stands there."""
    try:
        fields = heard(store.get(f"watch/{rank}"), _LONGEST_BEAT)
        return _Beat(
            number=int(fields["number"]),
            exchange=None if fields["exchange"] is None else str(fields["exchange"]),
            where=str(fields["where"]),
            waited=float(fields["waited"]),
            step=int(fields["step"]),
            count=int(fields["count"]),
            ranks=tuple(int(one) for one in fields["ranks"]),
            line=str(fields["line"]),
        )
    except (DistributedTorchError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _say(text: str) -> None:
    print(f"distributedtorch: {shown(text)}", file=sys.stderr, flush=True)


def _end(text: str) -> NoReturn:
    _say(f"{DesyncError.__name__}: {text}")
    os._exit(1)
