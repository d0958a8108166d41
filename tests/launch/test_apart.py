"""The end of jobs with a server in a process of its own: named rightly, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Run

JOB = Path(__file__).with_name("apart_job.py")
RUN = ("-m", "distributedtorch", "run", "--workers", 3)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3)
Start = Callable[..., Run]


@pytest.mark.parametrize("starter", [RUN, pytest.param(TORCHRUN, marks=pytest.mark.long)], ids=["dtorch", "torchrun"])
def test_a_server_ends_well_when_the_last_worker_is_done(start: Start, starter: tuple[object, ...]) -> None:
    run = start(*starter, JOB, "none")
    assert run.end() == 0, run.err
    assert run.gone_within(0.5)
    assert "distributedtorch: 2 workers, 1 server" in run.err
    assert "done 0 of 2" in run.out
    assert {path.name for path in run.folder.glob("after.*")} == {"after.0", "after.1"}


def test_a_killed_server_is_named(start: Start) -> None:
    run = start(*RUN, JOB, "forever")
    run.until_running()
    os.kill(run.pid(2), signal.SIGKILL)
    assert run.end(10) == 137
    assert run.gone_within(0.5)
    assert "dtorch: server 0 (process 2) failed first: was killed by SIGKILL (signal 9)" in run.err


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "failing",
            "server 0 (process 2) failed first: ArithmeticError: no more steps",
            marks=pytest.mark.long,
        ),
        pytest.param("raise", "rank 1 failed first: ValueError: a bad sample", marks=pytest.mark.long),
    ],
)
def test_the_first_cause(start: Start, fault: str, said: str) -> None:
    run = start(*RUN, JOB, fault)
    assert run.end() == 1
    assert run.gone_within(0.5)
    assert f"dtorch: {said}" in run.err


@pytest.mark.long
def test_ctrl_c(start: Start) -> None:
    run = start(*RUN, JOB, "rescue")
    run.until_running()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end(10) == 128 + signal.SIGINT
    assert run.gone_within(0.5)
    assert "failed first" not in run.err and "no worker has been connected" not in run.err
    assert "rescued" in run.out, run.err


@pytest.mark.long
def test_a_stopped_server_is_named(start: Start) -> None:
    run = start(*RUN, JOB, "forever")
    run.until_running()
    os.kill(run.pid(2), signal.SIGSTOP)
    run.until(lambda: "has not answered rank 0 for" in run.err)
    run.until(lambda: "there is no connection to it" in run.err)  # heartbeats have ended it
    assert run.end(90) == 1
    assert "parameter server 0 at tcp://127.0.0.1:" in run.err and "has been out of reach for 30 s" in run.err
