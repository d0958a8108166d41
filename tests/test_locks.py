"""Locks between ranks: one at a time, readers together, in order; who gives up says who holds them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import distributedtorch as dt
from distributedtorch import locks
from distributedtorch.locks import Queue
from tests import forked


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Ranks:
    """Ranks as threads over one store; each writes down when it has the lock and when it gives it back."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.log: list[str] = []
        self.threads: list[threading.Thread] = []

    def queue(self, rank: int) -> Queue:
        return Queue(self.store, "x", rank)

    def ask(self, rank: int, *, read: bool = False) -> None:
        """Begin to wait; return when that stands in the store."""
        before = len(self.queue(rank).turns())
        self.threads.append(threading.Thread(target=self._hold, args=(rank, read)))
        self.threads[-1].start()
        until(lambda: len(self.queue(rank).turns()) > before)

    def _hold(self, rank: int, read: bool) -> None:
        with self.queue(rank).turn(read=read, timeout=20):
            self.log.append(f"+{rank}")
            time.sleep(0.03)
            self.log.append(f"-{rank}")

    def end(self) -> None:
        for thread in self.threads:
            thread.join()


def test_who_asks_first_has_it_first() -> None:
    ranks = Ranks()
    with ranks.queue(0).turn(read=False, timeout=1):
        for rank in (3, 1, 2):
            ranks.ask(rank)
    ranks.end()
    assert ranks.log == ["+3", "-3", "+1", "-1", "+2", "-2"]
    assert ranks.queue(0).turns() == []


def test_readers_are_together_and_do_not_overtake_a_writer() -> None:
    ranks = Ranks()
    with ranks.queue(0).turn(read=True, timeout=1):
        ranks.ask(1, read=True)
        until(lambda: "-1" in ranks.log)  # while rank 0 reads
        ranks.ask(2)
        ranks.ask(3, read=True)
        ranks.ask(4, read=True)
        time.sleep(0.05)
        assert ranks.log == ["+1", "-1"]
    ranks.end()
    assert ranks.log[2:4] == ["+2", "-2"]
    assert set(ranks.log[4:6]) == {"+3", "+4"}


def test_readers_that_overtake_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotaged twin: readers wait only for a writer that holds the lock."""
    fair = locks.before

    def unfair(turns: list[locks.Turn], mine: locks.Turn) -> list[locks.Turn]:
        return [turn for turn in fair(turns, mine) if not mine.reads or turn.since]

    monkeypatch.setattr(locks, "before", unfair)
    with pytest.raises(AssertionError):
        test_readers_are_together_and_do_not_overtake_a_writer()


def test_who_gives_up_says_who_has_it_and_leaves_the_queue() -> None:
    ranks = Ranks()
    with ranks.queue(2).turn(read=False, timeout=1):
        ranks.ask(1)
        with pytest.raises(dt.LockError) as caught, ranks.queue(0).turn(read=True, timeout=0.02):
            pass
        assert [turn.rank for turn in ranks.queue(0).turns()] == [2, 1]
    ranks.end()
    said = str(caught.value)
    assert re.search(
        r"rank 0 has waited \d\.\d s to read under lock 'x' at .*test_locks.py:\d+ in test_who_gives", said
    )
    assert "rank 2 holds it since " in said and "; waiting before it: rank 1 (" in said
    assert "needed:" in said and "do:" in said


def test_a_lock_is_given_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), dt.lock("error"):
        _ = 1 / 0
    with dt.lock("error", timeout=0):
        pass


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_SECONDS_BETWEEN_SIGNS", 0.01)
    monkeypatch.setattr(locks, "_SECONDS_OF_SILENCE", 0.25)
    ranks = Ranks()
    with ExitStack() as stack:
        stack.enter_context(ranks.queue(1).turn(read=False, timeout=1))  # its process gives no sign
        with pytest.raises(dt.PeerError, match="rank 1 gives no sign of life") as caught:
            stack.enter_context(ranks.queue(0).turn(read=False, timeout=20))
        assert caught.value.rank == 1
        beating = threading.Event()
        signs = threading.Thread(target=beat, args=(ranks.store, beating), daemon=True)
        signs.start()
        with pytest.raises(dt.LockError):  # alive, and slow
            stack.enter_context(ranks.queue(0).turn(read=False, timeout=0.6))
        beating.set()
        signs.join()


def beat(store: HashStore, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(0.02):
        number += 1
        status = {
            "exchange": None,
            "where": "",
            "waited": 0.0,
            "step": 0,
            "count": 0,
            "ranks": [],
            "line": "",
            "busy": "",
        }
        store.set("watch/1", json.dumps({"number": number, **status}))


def test_one_process_holds_back_its_threads() -> None:
    seen: list[str] = []

    def other() -> None:
        with dt.lock("one"):
            seen.append("other")

    with dt.lock("one"):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.03)
        seen.append("first")
    thread.join()
    assert seen == ["first", "other"]


@pytest.mark.parametrize("read", [False, True])
def test_a_lock_inside_itself_is_refused(read: bool) -> None:
    with (
        dt.lock("again", read=read),
        dt.lock("another"),
        pytest.raises(dt.UsageError, match=r"dt.lock\('again'\) inside a block that holds it already, on rank 0"),
        dt.lock("again", read=read),
    ):
        pass
    with dt.lock("again", timeout=0):
        pass


@pytest.mark.parametrize(("name", "timeout"), [("", 1.0), (3, 1.0), ("x", -1.0), ("x", float("nan"))])
def test_what_cannot_be_meant_is_refused(name: str, timeout: float) -> None:
    with pytest.raises(dt.UsageError), dt.lock(name, timeout=timeout):
        pass


def test_three_ranks_one_at_a_time(tmp_path: Path) -> None:
    ended = forked.run(3, "tests.locks_pool", str(tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "one at a time" in ended.stdout


def test_a_lock_that_holds_nobody_back_is_seen(tmp_path: Path) -> None:
    ended = forked.run(3, "tests.locks_pool", str(tmp_path), "sabotage", cwd=tmp_path)
    assert ended.returncode != 0
    assert "of 45 counted" in ended.stderr
