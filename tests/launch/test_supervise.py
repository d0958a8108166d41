"""Every way a run can end: how fast, who is named, with which code, and that nothing is left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

LEFT = "rank 1 left the loop after step 5 (its script ended with code 0) while rank 0 went on to step 6"
SHARED = """
import os
from distributedtorch.launch import place, record
record.joined(place.find())
print(*(os.environ[name] for name in ("OMP_NUM_THREADS", "DISTRIBUTEDTORCH_THREADS", "GLOO_SOCKET_IFNAME")))
"""
JOB = Path(__file__).with_name("job.py")


def folder_of(run):
    (found,) = (run.folder / ".dtorch").iterdir()
    return found


@pytest.mark.parametrize(
    ("fault", "rank", "words", "code"),
    [
        ("raise", 1, "rank 1 failed first: ValueError: a bad sample", 1),
        pytest.param("raise", 0, "rank 0 failed first: ValueError, see above", 1, marks=pytest.mark.long),
        ("raise-lingering", 1, "rank 1 failed first: ValueError: a bad sample", 1),
        pytest.param("foreign-hook", 1, "rank 1 failed first: ValueError: a bad sample", 1, marks=pytest.mark.long),
        pytest.param("in-handler", 1, "rank 1 failed first: ValueError: a bad sample", 1, marks=pytest.mark.long),
        ("exit", 1, "rank 1 failed first: exited with code 3 at ", 3),
        pytest.param("hard-exit", 1, "rank 1 failed first: exited with code 4", 4, marks=pytest.mark.long),
        ("kill", 1, "rank 1 failed first: was killed by SIGKILL (signal 9), often the out-of-memory killer", 137),
        pytest.param("kill", 0, "rank 0 failed first: was killed by SIGKILL (signal 9)", 137, marks=pytest.mark.long),
        (
            "leave",
            1,
            LEFT,
            1,
        ),
    ],
)
def test_the_first_cause_is_named_and_all_end(job, fault, rank, words, code):
    run = job(fault, rank)
    assert run.end() == code, run.err
    assert run.seconds_since_fault() < 5
    assert run.gone_within(0.5)
    assert f"dtorch: rank {rank} failed first: " in run.err
    assert words in run.err
    assert "step 5" in run.err
    assert ("`if dt.any(flag): break`" in run.err) == (fault == "leave")
    assert str(folder_of(run)) in run.err
    if "ValueError" in words:
        assert "in explode()" in run.err
        assert run.err.count("a bad sample") == run.err.count('("a bad sample")') + 1, "its text once, beside its line"


def test_an_error_of_all_ranks_is_shown_once_with_the_users_frames(job):
    run = job("refused", -1)
    assert run.end() == 1, run.err
    assert run.err.count("no word of a plan") == 1, run.err
    assert "PlanError, see above" in run.err and "in refused()" in run.err
    assert "core/plan.py" not in run.err and "in loop" in run.err


def test_a_good_run_ends_with_0_and_leaves_nothing(job):
    run = job("none")
    assert run.end() == 0, run.err
    assert run.gone_within(0.5)
    assert not (run.folder / ".dtorch").exists()


def test_rank_0_may_go_on_alone_after_the_others_ended_well(job):
    run = job("evaluate")
    run.until((run.folder / "pid.1").exists)
    last = run.pid(1)
    run.until(lambda: Path(f"/proc/{last}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    (run.folder / "go").touch()
    assert run.end() == 0, run.err
    assert "evaluated" in run.out


def test_killing_the_supervisor_ends_the_ranks(job):
    run = job("forever")
    run.until_running()
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    assert run.gone_within(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_to_the_supervisor_ends_the_run_with_its_code(job, number):
    run = job("forever")
    run.until_running()
    began = time.monotonic()
    os.kill(run.process.pid, number)
    assert run.end() == 128 + number
    assert time.monotonic() - began < 5
    assert run.gone_within(0.5)
    assert run.err.count(f"dtorch: ended by {number.name}") == 1
    assert "failed first" not in run.err
    assert "Traceback" not in (folder_of(run) / "rank1.log").read_text() or number != signal.SIGINT


def test_data_workers_go_with_their_ranks(job):
    run = job("data")
    run.until_running()
    assert len(run.left()) == 1 + 2 + 4
    os.kill(run.pid(1), signal.SIGKILL)
    began = time.monotonic()
    assert run.end() == 137
    assert time.monotonic() - began < 5
    assert run.gone_within(0.5)


def test_a_stopped_rank_is_ended_too(job):
    run = job("forever", 1, 2)
    run.until_running()
    os.kill(run.pid(0), signal.SIGSTOP)
    began = time.monotonic()
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 137
    assert time.monotonic() - began < 5
    assert "rank 1 failed first: was killed by SIGKILL" in run.err
    assert run.gone_within(0.5)


@pytest.mark.parametrize("fault", ["unjoined", "unjoined-one"])
def test_a_rank_that_never_joins_is_told_apart(job, fault):
    run = job(fault)
    assert run.end() == 2
    assert "dt.distribute" in run.err
    assert ("rank 1 ended with code 0 before it called" in run.err) == (fault == "unjoined-one")
    assert run.gone_within(0.5)


def test_logs_are_the_users_own(job):
    run = job("raise")
    run.end()
    folder = folder_of(run)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "end.1.json").stat().st_mode) == 0o600
    assert "ValueError: a bad sample" in (folder / "rank1.log").read_text()


def test_everything_listens_on_loopback_only(job):
    run = job("forever")
    run.until_running()
    pids = set(run.left())
    rows = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [row.split()[3] for row in rows if any(f"pid={pid}," in row for pid in pids)]
    assert len(ours) == 2, rows  # one of gloo's per rank, which takes nobody any more
    assert all(address.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")) for address in ours), ours


def test_ranks_share_the_cores(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    environ = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", script]
    out = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(max(1, len(os.sched_getaffinity(0)) // 2)), "divided", "lo"]


@pytest.mark.long
@pytest.mark.parametrize(("script", "code"), [("train.py", 0), ("job.py", 1)])
def test_output_that_nobody_reads_costs_no_run(tmp_path, script, code):
    """As with `2>&1 | head -1`; what the script itself prints there fails as in one process."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", JOB.with_name(script), "raise", "1"]
    done = subprocess.run(
        [*command[:7], "out"] if code == 0 else command, cwd=tmp_path, stdout=writer, stderr=writer, check=False
    )
    os.close(writer)
    assert done.returncode == code
    assert not code or list(tmp_path.glob(".dtorch/*/end.1.json"))
