"""Which errors count as the consequence of another rank's end, who is named, and what is shown of an error."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import PeerError, UsageError
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import here
from distributedtorch.launch import record
from distributedtorch.launch.place import Place
from distributedtorch.launch.ranks import Rank
from distributedtorch.launch.record import End, is_consequence
from distributedtorch.launch.verdict import headline, judge

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:3504."


def caught(raising):
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError


def lost():
    try:
        raise RuntimeError("unknown words of a back end")
    except RuntimeError as error:
        raise PeerError("rank 1 ended") from error


def own_while_handling_lost():
    try:
        lost()
    except PeerError:
        raise OSError("saving failed") from None


def lost_while_handling_own():
    try:
        raise ValueError("own")
    finally:
        lost()


def test_a_lost_peer_is_a_consequence_in_any_words():
    assert is_consequence(caught(lost))
    assert is_consequence(RuntimeError(GLOO))


def test_what_follows_a_lost_peer_is_a_consequence():
    assert is_consequence(caught(own_while_handling_lost))


def test_an_error_of_ones_own_is_not():
    assert not is_consequence(ValueError("Connection closed by peer"))
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(caught(lost_while_handling_own))


def test_an_exit_counts_though_the_rank_was_stopped_on_its_way_out(tmp_path: Path) -> None:
    """Its peers notice that it leaves, fail, and end before it does."""
    ends = [
        End(rank=0, kind="raised", type="PeerError", message="rank 1 is gone", time=2.0, consequence=True),
        End(rank=1, kind="exit", code=3, where="train.py:20", time=1.0),
    ]
    for end in ends:
        (tmp_path / f"end.{end.rank}.json").write_text(json.dumps(asdict(end)))
    ranks = [Rank(0, None, -1, None, status=1, ended=2.1), Rank(1, None, -1, None, status=-15, ended=3.0, stopped=True)]
    found = judge(ranks, tmp_path)
    assert (found.rank, found.code) == (1, 3) and "exited with code 3 at train.py:20" in found.text


def shown_by(hook, error: BaseException, capsys) -> str:
    hook(type(error), error, error.__traceback__)
    return str(capsys.readouterr().err)


def refused():
    Plan.of("zebra").check(2)


def test_an_error_of_the_library_ends_in_the_users_line(capsys, monkeypatch) -> None:
    hook = record._hook(sys.__excepthook__, 0)
    text = shown_by(hook, caught(refused), capsys)
    assert "in refused" in text and "core/plan.py" not in text and text.count("no word of a plan") == 1
    monkeypatch.setenv("DISTRIBUTEDTORCH_TRACEBACK", "full")
    assert "core/plan.py" in shown_by(hook, caught(refused), capsys)


def test_other_errors_keep_all_their_frames(capsys) -> None:
    text = shown_by(record._hook(sys.__excepthook__, 0), caught(lambda: json.loads("{")), capsys)
    assert "json/decoder.py" in text


def test_the_headline_leaves_out_what_the_terminal_has(tmp_path: Path) -> None:
    ends = [
        End(
            rank=0, kind="raised", type="UsageError", message="no\n  do: x", traceback="  File\n", time=2.0, shown=True
        ),
        End(rank=1, kind="raised", type="UsageError", message="no\n  do: x", traceback="  File\n", time=1.0),
    ]
    ranks = [Rank(rank, None, -1, None, status=1, ended=2.1) for rank in range(2)]

    def said(*left: End) -> str:
        for end in left:
            (tmp_path / f"end.{end.rank}.json").write_text(json.dumps(asdict(end)))
        return headline(judge(ranks, tmp_path), tmp_path)

    assert said(*ends).splitlines()[:2] == ["dtorch: rank 1 failed first: UsageError, see above", "  at step 0"]
    assert "do: x" in said(replace(ends[0], shown=False)) and "do: x" in said(replace(ends[0], message="other"))


def test_one_rank_of_a_host_prints_the_same_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(record._here, "logs", lambda: tmp_path / "logs")
    (tmp_path / "logs").mkdir(mode=0o700)
    (tmp_path / "logs" / "said.1.0").touch()
    assert [record._was_said(text) for text in ("a", "a", "b")] == [False, True, False]
    assert not (tmp_path / "logs" / "said.1.0").exists(), "of an earlier run"


@pytest.mark.parametrize(
    ("rows", "error", "noted"),
    [
        (Rows(mine=1, everywhere=2), IndexError("too many indices"), "1 of the 2 rows"),
        (Rows(mine=0, everywhere=2), IndexError("too many indices"), "none (another stands in) of the 2 rows"),
        (Rows(mine=2, everywhere=4), IndexError("too many indices"), ""),
        (Rows(mine=1, everywhere=1), IndexError("too many indices"), ""),
        (Rows(mine=1, everywhere=2), UsageError("not about rows"), ""),
        (Rows(mine=1, everywhere=2), KeyboardInterrupt(), ""),
        (None, IndexError("too many indices"), ""),
    ],
)
def test_an_error_on_a_lone_row_says_so(rows, error, noted, monkeypatch):
    monkeypatch.setattr(here().loop.batches, "present", rows)
    monkeypatch.setattr(record, "_here", record._Rank())
    record.raised(error)
    notes = "".join(getattr(error, "__notes__", []))
    assert (noted in notes and "squeeze" in notes) if noted else not notes


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place whose record this process may come to write."""
    monkeypatch.setattr(record, "_here", record._Rank())
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    yield Place(rank=1, world=2, local_rank=1, local_world=2, launcher="dtorch", run_folder=tmp_path)
    for act in (record._at_exit, record._flush):
        atexit.unregister(act)


@pytest.mark.parametrize(("parent", "speaks"), [(os.getppid(), True), (os.getpid(), False)])
def test_what_a_rank_starts_does_not_speak_for_it(
    installed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: int, speaks: bool
) -> None:
    """A process with the rank's environment, say a worker that is spawned, or a script that may fail."""
    monkeypatch.setenv(record.SUPERVISOR, str(parent))
    record.install(installed)
    record.raised(ValueError("in a child"))
    assert (tmp_path / "end.1.json").exists() == (tmp_path / "step.1").exists() == speaks


def test_a_child_that_joins_is_the_rank(installed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(record.SUPERVISOR, str(os.getpid()))
    record.install(installed)
    record.joined(installed)
    record.raised(ValueError("in training"))
    assert (tmp_path / "end.1.json").exists() and (tmp_path / "joined.1").exists()
