"""A rank that does not come ends the job, by its name and line; one that has a reason does not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from distributedtorch.elastic import watch
from distributedtorch.launch.ranks import Rank
from distributedtorch.launch.record import End
from distributedtorch.launch.verdict import judge
from tests import forked


def test_ranks_that_loop_or_are_stopped_end_the_job_by_name(tmp_path: Path) -> None:
    ended = forked.run(4, "tests.launch.hung", "lost", cwd=tmp_path, environ={"DISTRIBUTEDTORCH_HANG": "0.5s"})
    assert ended.returncode == 1
    assert 'rank 1 failed first: rank 1 has not come to "barrier" (step 0) for ' in ended.stderr
    assert "tests/launch/hung.py:" in ended.stderr and "in stuck()" in ended.stderr
    assert 'rank 2 has not come to "barrier"' in ended.stderr
    assert "within 0.5 s (--hang" in ended.stderr and "dt.any(flag)" in ended.stderr


def test_ranks_say_what_they_are_busy_with_and_wait_for_the_prompt(tmp_path: Path) -> None:
    ended = forked.run(2, "tests.launch.hung", "busy", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "came to its end\n"
    said = [line for line in ended.stderr.splitlines() if "breakpoint() at" in line]
    assert len(said) == 2 and all("rank 0 has the prompt, and the others wait" in line for line in said), ended.stderr


@pytest.mark.long
def test_a_rank_that_does_not_wait_for_the_prompt_is_found(tmp_path: Path) -> None:
    ended = forked.run(2, "tests.launch.hung", "busy", "deaf", cwd=tmp_path)
    assert ended.returncode == 1 and "rank 1 did not wait" in ended.stderr


class Clock:
    """Time as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Member:
    rank, world = 0, 4


def watching(excused: list[float]) -> watch._Watch:
    nothing = watch.Status(exchange=None, where="", since=None, step=0, count=0)
    made = watch._Watch(Member(), None, lambda: nothing, watch._end, print, hang=9.0, excuse=excused.append)  # type: ignore[arg-type]
    return made


def beat(exchange: str | None = "sum", waited: float = 0.0, busy: str = "", ranks: tuple[int, ...] = ()) -> watch._Beat:
    return watch._Beat(
        number=1, exchange=exchange, where="", waited=waited, step=3, count=7, ranks=ranks, line="x.py:1", busy=busy
    )


def test_only_time_in_which_nobody_has_a_reason_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, excused = Clock(monkeypatch), []
    made = watching(excused)
    for passed, busy, counted in (
        (3, "", 3),
        (1, "", 4),
        (1, "a save", 4),
        (1, watch.AT_A_PROMPT, 4),
        (1, watch.ENDED, 5),
        (1000, "", 5 + watch._SECONDS_STALE),  # this process was stopped meanwhile, or the machine slept
        (1, "", 6 + watch._SECONDS_STALE),
    ):
        clock.now += passed
        made.seen = {1: watch._Seen(beat(None, busy=busy), clock.now)}
        made._count(beat(waited=clock.now - 100))
        assert made.counted == counted
    assert sum(excused) == 2 + 1000 - watch._SECONDS_STALE
    made._count(beat("another", waited=1.0))
    assert made.counted == 1.0


def test_the_ranks_at_the_root_of_a_wait_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def missing(*beats: watch._Beat, answers: tuple[bool, ...] = (True, True, True)) -> list[int]:
        made = watching([])
        fresh = [clock.now - (0 if one else 100) for one in answers]
        made.seen = {k + 1: watch._Seen(one, fresh[k]) for k, one in enumerate(beats)}
        return made._missing([1])

    assert missing(beat(None), beat(None), beat(None)) == [1]
    assert missing(beat("other", ranks=(1, 2)), beat(None), beat(None)) == [2]  # 0 waits for 1, and 1 for 2
    assert missing(beat(), beat(), beat()) == []  # all are there: it is slow
    assert missing(beat(), beat(), beat(), answers=(True, False, True)) == [2]  # stopped inside the exchange before
    assert missing(beat(), beat(None), beat(), answers=(True, True, False)) == [2]


def test_who_is_waited_for_in_vain_is_blamed_and_not_who_gives_up(tmp_path: Path) -> None:
    """As without the watch: the exchange's own limit was reached."""
    end = End(rank=0, kind="raised", type="PeerError", message="rank 1 has not come for 1860 s", step=6, time=2.0)
    fields = {**end.__dict__, "where": "train.py:30", "consequence": True, "peer": 1}
    (tmp_path / "end.0.json").write_text(json.dumps(fields))
    ranks = [Rank(0, None, -1, None, status=1, ended=2.1), Rank(1, None, -1, None, status=-9, ended=5.0, stopped=True)]
    found = judge(ranks, tmp_path)
    assert found.rank == 1
    assert found.text == "rank 0 gave up waiting for it (step 6 at train.py:30): rank 1 has not come for 1860 s"


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"rank": 1, "type": "EOFError", "message": "EOF when reading a line"}, "only rank 0 has standard input"),
        ({"rank": 0, "type": "EOFError", "message": "EOF when reading a line"}, ""),
        ({"rank": 1, "type": "EOFError", "message": "Ran out of input"}, ""),
        ({"rank": 1, "type": "BdbQuit", "message": ""}, "only rank 0 has a terminal: call breakpoint()"),
    ],
)
def test_ranks_without_a_terminal_are_told_so(tmp_path: Path, fields: dict[str, object], advice: str) -> None:
    rank = int(str(fields["rank"]))
    (tmp_path / f"end.{rank}.json").write_text(json.dumps({"kind": "raised", "step": 3, **fields}))
    found = judge([Rank(rank, None, -1, None, status=1, ended=2.1)], tmp_path)  # type: ignore[arg-type]
    assert (f"do: {advice}" in found.detail) if advice else ("do:" not in found.detail)
