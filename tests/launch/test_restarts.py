"""`dtorch run --restarts`: all ranks start again after a failure, and go on from their checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distributedtorch.launch import ranks
from tests.launch.conftest import Run

RESUMED = Path(__file__).parents[1] / "checkpoint/resumed.py"
KILLED = """
import os, signal
import torch, distributedtorch as dt
model = torch.nn.Linear(2, 1)
model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
dt.barrier()
if dt.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dt.barrier()
"""


def run_of(start: Callable[..., Run], restarts: int, *script: object) -> Run:
    return start("-m", "distributedtorch", "run", "--workers", 2, "--restarts", restarts, *script)


@pytest.mark.timeout(120)
def test_a_killed_rank_costs_nothing_that_was_saved(start: Callable[..., Run], tmp_path: Path) -> None:
    given = (tmp_path, "zero1", 6, 0.1)
    run = run_of(start, 1, RESUMED, *given)
    log = tmp_path / "log.2.1"
    run.until(lambda: log.exists() and log.read_bytes().count(b"\n") > 8)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 0, run.err
    assert "rank 1 failed first: was killed by SIGKILL" in run.err
    assert run.err.count("dtorch: starting again (1 of 1)") == 1
    (tmp_path / "truth").mkdir()
    truth = run_of(start, 0, RESUMED, tmp_path / "truth", *given[1:])
    assert truth.end() == 0, truth.err
    assert (tmp_path / "end").read_text() == (tmp_path / "truth/end").read_text()


@pytest.mark.long
@pytest.mark.timeout(90)
def test_it_ends_when_all_starts_are_spent(start: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    run = run_of(start, 2, script)
    assert run.end() == 137
    assert [f"starting again ({k} of 2)" in run.err for k in (1, 2, 3)] == [True, True, False]
    assert run.err.count("rank 1 failed first") == 3 and run.gone_within(0.5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import distributedtorch as dt\nraise ValueError('a wrong path')", "a wrong path"),
        (KILLED.replace("dt.barrier()", "model(torch.ones(3, 2)).sum().backward()", 1), "the loss is a sum"),
    ],
)
def test_what_would_fail_again_is_not_started_again(
    start: Callable[..., Run], tmp_path: Path, text: str, said: str
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(text)
    run = run_of(start, 3, script)
    assert run.end() == 1 and said in run.err and "starting again" not in run.err


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_signal_to_the_starter_ends_it(start: Callable[..., Run], tmp_path: Path) -> None:
    run = run_of(start, 3, RESUMED, tmp_path, "ddp", 100000, 0.0)
    log = tmp_path / "log.2.1"
    run.until(lambda: log.exists() and log.stat().st_size > 0)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143 and "starting again" not in run.err and run.gone_within(0.5)


def test_less_than_none_is_refused(start: Callable[..., Run]) -> None:
    run = run_of(start, -1, RESUMED)
    assert run.end() == 2 and "-1 restarts given" in run.err


def test_a_run_inside_another_does_not_touch_what_that_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ranks.KEPT_VARIABLE, "outer")
    monkeypatch.setenv(ranks.ATTEMPT_VARIABLE, "2")
    assert not {ranks.KEPT_VARIABLE, ranks.ATTEMPT_VARIABLE} & ranks.environment(0, 2, 1, tmp_path, None).keys()
