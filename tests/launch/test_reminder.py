"""While ranks wait for others at the start, one of them says for whom."""

from __future__ import annotations

import threading

import pytest

from distributedtorch.launch import record, reminder
from distributedtorch.launch.place import Launcher, Place


class Store:
    def __init__(self, there: list[int]) -> None:
        self.there = there

    def check(self, keys: list[str]) -> bool:
        return all(int(key.removeprefix("joined/")) in self.there for key in keys)


def place(rank: int, launcher: Launcher = "dtorch") -> Place:
    return Place(rank=rank, world=4, local_rank=rank, local_world=4, launcher=launcher, run_folder=None)


@pytest.mark.parametrize(
    ("rank", "there", "said"),
    [
        (1, [1, 2], "rank 1 waits for rank 0, 3 of 4 to call dt.distribute"),
        (2, [1, 2], ""),  # rank 1 says it
        (1, [0, 1, 2, 3], ""),
    ],
)
def test_the_missing_are_named_by_the_first_who_is_there(
    monkeypatch: pytest.MonkeyPatch, rank: int, there: list[int], said: str
) -> None:
    monkeypatch.setattr(record, "has_reached", lambda: True)
    monkeypatch.setattr(reminder, "client", lambda: Store(there))
    assert reminder.missing(place(rank)) == said


def test_a_rank_that_finds_nobody_says_where_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(record, "has_reached", lambda: False)
    said = reminder.missing(place(0, "torchrun"))
    assert said.startswith("rank 0 of 4 waits for the others at host7:29500 (RANK and WORLD_SIZE are set")


def test_it_is_said_until_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reminder, "_SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(reminder, "missing", lambda _: "rank 0 waits")
    lines, twice = [], threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            twice.set()

    monkeypatch.setattr(record, "say", say)
    with reminder.reminding(place(0)):
        assert twice.wait(30)
    count = len(lines)
    assert "rank 0 waits (for " in lines[0] and "test_reminder.py:" in lines[0]
    assert not any(thread.name == "distributedtorch-reminder" for thread in threading.enumerate())
    assert len(lines) == count
