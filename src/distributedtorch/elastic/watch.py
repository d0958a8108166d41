"""The watch: one thread per rank that says within seconds who waits for whom, and where.

Once a second each rank puts its status (the exchange it waits in, its step, its line of code) into the store: a few
hundred bytes through a connection of its own. A rank that has waited 3 s reads the others' statuses. If every rank of
the exchange waits, two of them in different ones of the same group, and three beats in a row show no change, they wait
for each other for ever: all of them end, and the message names two ranks, both exchanges and both lines. If a rank
waits in no exchange, or in one of another group (which may only be slow), it is late: that is said after 8 s, by the
lowest rank that waits there, and at most once a minute. Durations are each reader's own; clocks are never compared.

A rank that has waited for the time of `hang` ends the job: it names the ranks that hold it up, with their lines. Time
counts only while no rank has a reason to be away (`Status.busy`), and while this process runs: a job that was stopped
as a whole, or a machine that slept, has not hung.

Not for speed (a rank slower than the others but moving is not named) and not for hosts that vanish (the exchange's own
connection or timeout tells).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core import where
from distributedtorch.core.errors import DesyncError, DistributedTorchError, shown, tell
from distributedtorch.core.plain import heard

_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_SUSPECT = 3.0
_SECONDS_TO_REPORT = 8.0
_SECONDS_TO_REPEAT = 60.0
_SECONDS_TO_AGREE = 3.0
_SECONDS_STALE = 4.0
_SECONDS_TO_STOP = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1
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
    busy: str = ""
    """Why the others may have to wait for long for this rank, if there is a reason: no hang is counted meanwhile."""


AT_A_PROMPT, ENDED = "at a prompt", "at its end"
"""What a rank may be busy with: somebody debugs it, and nobody is told that it does not come; its script has ended."""


TOGETHER = "ranks that leave a loop by their own numbers leave it together: `if dt.any(flag): break`"
"""What to do where one rank went another way."""


class Fail(Protocol):
    """Ends this process."""

    def __call__(self, text: str, *, missing: int | None = None) -> NoReturn:
        """Say why; `missing`: the rank that did not come, where that is the reason."""
        ...


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
    busy: str = ""


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
    fail: Fail | None = None,
    say: Callable[[str], None] | None = None,
    *,
    hang: float = math.inf,
    excuse: Callable[[float], None] = lambda _: None,
) -> Callable[[], None]:
    """Start the watch of this rank; the result stops it.

    Args:
        place: This rank and its world.
        store_factory: Opens a connection to the common store that no other thread uses.
        status: What the training thread does now; called from the watch's thread, so it must only read.
        fail: Ends this process with a message; by default it prints and exits with code 1.
        say: Prints one line where the user looks; by default on stderr.
        hang: After how many seconds of waiting for a rank that does not come the job is ended.
        excuse: Told of seconds this rank has waited that count for no limit.
    """
    watch = _Watch(place, store_factory, status, fail or _end, say or _say, hang=hang, excuse=excuse)
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
        fail: Fail,
        say: Callable[[str], None],
        *,
        hang: float,
        excuse: Callable[[float], None],
    ) -> None:
        self.place, self.store_factory, self.status, self.fail, self.say = place, store_factory, status, fail, say
        self.hang, self.excuse = hang, excuse
        self.wait: tuple[str | None, int] | None = None
        """The exchange that is waited for, and its number, once others are looked at."""
        self.counted = self.looked = 0.0
        """Seconds of it in which no rank had a reason to be away, and when this was last counted."""
        self.stopped = threading.Event()
        self.seen: dict[int, _Seen] = {}
        self.said = -_SECONDS_TO_REPEAT
        self.number = 0

    def run(self) -> None:
        """Beat until stopped, or until the store is gone: then others say why."""
        try:
            store = self.store_factory()
            store.set_timeout(timedelta(seconds=10))
            self._beat(store)
            while not self.stopped.wait(_SECONDS_BETWEEN_BEATS):
                self._beat(store)
            store.set(f"watch/{self.place.rank}", _encode(replace(self._own(), exchange=None, busy=ENDED)))
        except Exception:
            return

    def _beat(self, store: Store) -> None:
        mine = self._own()
        store.set(f"watch/{self.place.rank}", _encode(mine))
        if store.check([_VERDICT]):
            self._agree(store)
        if mine.exchange is None or mine.waited <= min(_SECONDS_TO_SUSPECT, self.hang):
            self.seen.clear()
            self.wait = None
            return
        self._read(store)
        self._count(mine)
        members = [rank for rank in mine.ranks or range(self.place.world) if rank != self.place.rank]
        others = {rank: self.seen[rank] for rank in members if rank in self.seen}
        text = mismatch(self.place.rank, mine, {rank: seen.beat for rank, seen in others.items()})
        if text and len(others) == len(members) and all(self._is_stuck(seen) for seen in others.values()):
            self._end_all(store, text)
        elif self.counted > self.hang and (missing := self._missing(members)):
            self._end_all(store, self._hung(mine, missing), missing[0])
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
            busy=status.busy,
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

    def _count(self, mine: _Beat) -> None:
        """Count the time since the last beat, unless a rank had a reason to be away, or this one did not run."""
        now, wait = time.monotonic(), (mine.exchange, mine.count)
        passed = now - self.looked
        if wait != self.wait:
            self.wait, self.counted, passed = wait, 0.0, mine.waited
        away = any(beat.busy not in ("", ENDED) for beat in (mine, *(seen.beat for seen in self.seen.values())))
        fair = 0.0 if away else min(passed, _SECONDS_STALE)
        self.looked, self.counted = now, self.counted + fair
        self.excuse(passed - fair)

    def _missing(self, members: Sequence[int]) -> list[int]:
        """The ranks that hold this one up: of those it waits for, and those that these wait for, who waits nowhere."""
        now, idle, silent, left, looked = time.monotonic(), set(), set(), [*members], {self.place.rank}
        while left:
            rank = left.pop()
            seen = self.seen.get(rank)
            if rank in looked:
                continue
            looked.add(rank)
            if seen is None or seen.beat.exchange is None:
                idle.add(rank)
            elif not self._answers(seen, now):
                silent.add(rank)
            else:
                left += seen.beat.ranks or range(self.place.world)
        return sorted(idle or silent)

    def _hung(self, mine: _Beat, missing: Sequence[int]) -> str:
        """The message for ranks that have not come for too long."""
        lines = [self._late(mine, rank, self.counted) for rank in missing]
        lines.append(f"  rank {self.place.rank} waits there at {mine.where}")
        given = "--hang, DISTRIBUTEDTORCH_HANG"
        lines.append(f"  needed: every rank to come to every exchange within {self.hang:g} s ({given})")
        return "\n".join([*lines, f"  do: look at that line; 1h or off gives more time; {TOGETHER}"])

    def _is_stuck(self, seen: _Seen) -> bool:
        """Whether that rank has waited long in one exchange, by several beats, the last one new."""
        if seen.beat.exchange is None:
            return False
        steady = seen.beat.waited > _SECONDS_TO_SUSPECT and seen.steady >= _BEATS_TO_BE_SURE
        return steady and self._answers(seen, time.monotonic())

    def _end_all(self, store: Store, text: str, missing: int | None = None) -> None:
        """Have all ranks end, with the words of whoever was first."""
        store.compare_set(_VERDICT, "", f"{'' if missing is None else missing}\n{text}")
        self._agree(store)

    def _agree(self, store: Store) -> None:
        """End with the others: the first to leave would take the store's view of it from them."""
        try:
            said = shown(store.get(_VERDICT)[:_LONGEST_VERDICT].decode(errors="replace"))
        except DistributedTorchError:
            return  # no rank of this job has said that
        missing, _, text = said.partition("\n")
        store.add("watch/agreed", 1)
        deadline = time.monotonic() + _SECONDS_TO_AGREE
        while store.add("watch/agreed", 0) < self.place.world and time.monotonic() < deadline:
            time.sleep(0.05)
        self.fail(text, missing=int(missing) if missing.isdecimal() else None)

    def _report(self, mine: _Beat, others: Mapping[int, _Seen], members: Sequence[int]) -> None:
        """Name the late ranks, if this is the rank to do so."""
        now = time.monotonic()
        here = [rank for rank, seen in others.items() if seen.beat.ranks == mine.ranks]
        waiting = [rank for rank in here if others[rank].beat.exchange is not None]
        late = [rank for rank in members if rank not in waiting or not self._answers(others[rank], now)]
        late = [rank for rank in late if rank not in others or others[rank].beat.busy != AT_A_PROMPT]
        if not late or now - self.said < _SECONDS_TO_REPEAT or any(rank < self.place.rank for rank in waiting):
            return
        self.said = now
        for rank in late:
            self.say(self._late(mine, rank, mine.waited))

    def _late(self, mine: _Beat, rank: int, seconds: float) -> str:
        seen = self.seen.get(rank)
        place = _whereabouts(seen.beat if seen else None, seen is None or self._answers(seen, time.monotonic()))
        return f'rank {rank} has not come to "{mine.exchange}" (step {mine.step}) for {seconds:.0f} s: {place}'

    def _answers(self, seen: _Seen, now: float) -> bool:
        return now - seen.fresh < _SECONDS_STALE


def beats(store: Store, rank: int) -> int:
    """How often a rank has given a sign of life; it does so every second while its process runs."""
    beat = _heard(store, rank) if store.check([f"watch/{rank}"]) else None
    return 0 if beat is None else beat.number


def until_past_prompt(store: Store, rank: int) -> None:
    """Return when a rank has left the prompt that it is at or comes to, or waits for others, or has ended."""
    key, first, seen = f"watch/{rank}", math.inf, False
    while True:
        beat = _heard(store, rank) if store.check([key]) else None
        if beat is not None:
            first, at = min(first, beat.number), beat.busy == AT_A_PROMPT
            waits = beat.number > first and beat.exchange is not None and beat.waited > _SECONDS_BETWEEN_BEATS
            if not at and (seen or waits or beat.busy == ENDED):
                return
            seen = seen or at
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def mismatch(rank: int, mine: _Beat, others: Mapping[int, _Beat]) -> str:
    """The message for ranks of one group that wait in different exchanges; empty where they do not."""
    for other, beat in sorted(others.items()):
        if beat.exchange is not None and beat.exchange != mine.exchange and beat.ranks == mine.ranks:
            (a, one), (b, two) = sorted([(rank, mine), (other, beat)])
            return (
                f'rank {a} waits in "{one.exchange}" (step {one.step}) at {one.where}, while '
                f'rank {b} waits in "{two.exchange}" (step {two.step}) at {two.where}: neither can go on\n'
                "  needed: every rank to make the same calls in the same order\n"
                "  do: take the call out of the branch that only some ranks run, or make all ranks run it; "
                f"{TOGETHER}"
            )
    return ""


def _whereabouts(beat: _Beat | None, answers: bool) -> str:
    if beat is None:
        return "nothing has been heard of it"
    if beat.busy == ENDED:
        return "its script has ended"
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
            busy=str(fields["busy"]),
        )
    except (DistributedTorchError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _say(text: str) -> None:
    tell(f"distributedtorch: {text}")


def _end(text: str, *, missing: int | None = None) -> NoReturn:
    _say(f"{DesyncError.__name__}: {text}")
    os._exit(1)
