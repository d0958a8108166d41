"""Which failures are worth another start, and what the supervisor was started with; ranks that need no torch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from distributedtorch.core.errors import LaunchError, tell
from distributedtorch.launch import command, ranks, supervise
from distributedtorch.launch.record import End

RANK = """
import json, os, shutil, sys, time
rank, folder = os.environ["RANK"], os.environ["DISTRIBUTEDTORCH_RUN"]
attempt = os.environ.get("DISTRIBUTEDTORCH_ATTEMPT", "0")
news = os.open(folder + "/news", os.O_WRONLY)
def say(line):
    os.write(news, line.encode() + b"\\n")
def meet():
    say("joined " + rank)
    open(f"met.{attempt}.{rank}", "w").close()
    while not all(os.path.exists(f"met.{attempt}.{k}") for k in "01"):
        time.sleep(0.002)
"""
"""What a rank of these tests begins with: its name, and how it speaks to the supervisor."""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Supervise two ranks of this text, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, restarts: int = 0) -> int:
        (tmp_path / "rank.py").write_text(RANK + text)
        plain = [sys.executable, "-I", "-S", str(tmp_path / "rank.py")]
        return supervise.supervise(plain, 2, plan=None, script=None, restarts=restarts)

    return run


def test_a_failure_before_the_call_is_worth_another_start_once_all_have_joined(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("if attempt == '1' and rank == '1': sys.exit(4)\nmeet()\nif attempt == '0': sys.exit(3)\n", 3)
    said = capsys.readouterr().err
    assert code == 0, said
    assert "starting again (2 of 3)" in said and "starting again (3 of 3)" not in said


def test_a_failure_before_the_call_is_not_where_nobody_has_joined(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sys.exit(4)\n", 3) == 4
    assert "starting again" not in capsys.readouterr().err


def test_what_ranks_have_said_outlives_their_folder(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody clears away what git does not know of, while the job runs."""
    code = run(
        "meet()\nif rank == '0': shutil.rmtree(os.path.dirname(folder))\n"
        "while os.path.exists(folder): time.sleep(0.002)\nif attempt == '0' and rank == '1': sys.exit(3)\n",
        2,
    )
    said = capsys.readouterr().err
    assert code == 0, said
    assert said.count("starting again") == 1 and "before it joined" not in said


def hung(step: int) -> str:
    """A rank that leaves what `record.fail` does where rank 1 has not come."""
    end = End(rank=0, kind="raised", type="DesyncError", message="rank 1 has not come", step=step, code=1, missing=1)
    return f"""
meet()
if rank == '0':
    open(folder + "/step.1", "wb").write(({step} + int(attempt) * STRIDE).to_bytes(8, sys.byteorder))
    open(folder + "/end.0.json", "w").write({json.dumps(json.dumps(asdict(end)))})
    say("raised 0")
    sys.exit(1)
time.sleep(60)
"""


@pytest.mark.parametrize(("stride", "starts"), [("0", 2), ("1", 3)])
def test_two_hangs_at_one_step_end_the_job(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stride: str, starts: int
) -> None:
    monkeypatch.setattr(supervise, "_SECONDS_TO_END", 0.1)
    assert run(hung(7).replace("STRIDE", stride), 2) == 1
    said = capsys.readouterr().err
    assert said.count("dtorch: rank 1 failed first: rank 1 has not come") == starts
    assert ("has not come at step 7 for the second time" in said) == (starts == 2)


def test_a_hang_is_shorter_where_all_can_start_again(run: Run, tmp_path: Path) -> None:
    text = "meet()\nopen(f'hang.{rank}', 'w').write(os.environ.get('DISTRIBUTEDTORCH_HANG', 'none'))\n"
    for restarts, said in ((0, "none"), (1, ranks.HANG_WITH_RESTARTS)):
        assert run(text, restarts) == 0
        assert (tmp_path / "hang.1").read_text() == said


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("1.5 min", 90), ("2h", 7200), ("off", float("inf"))])
def test_the_time_of_a_hang_is_read(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(ranks.HANG_VARIABLE, text)
    assert ranks.hang_asked() == seconds


@pytest.mark.parametrize("text", ["", "2", "0s", "-1s", "5 days", "soon"])
def test_another_time_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setenv(ranks.HANG_VARIABLE, text)
    with pytest.raises(LaunchError, match=f"a hang of '{text}'"):
        run("")
    assert not (tmp_path / ".dtorch").exists()


def test_ignored_children_are_waited_for_all_the_same(run: Run) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run("meet()\n") == 0
        assert run("meet()\nsys.exit(3 * int(rank))\n") == 3
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_working_folder_that_is_gone_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match="the working folder is gone"):
        run("meet()\n")


@pytest.mark.parametrize("closed", ["reader", "stream", "none"])
def test_a_line_that_nobody_reads_costs_nothing(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    reader, writer = os.pipe()
    stream = open(writer, "w", buffering=1)  # noqa: SIM115
    os.close(reader)
    if closed == "stream":
        os.dup2(os.open(os.devnull, os.O_RDONLY), writer)
        stream.close()
    monkeypatch.setattr(sys, "stderr", None if closed == "none" else stream)
    tell("one")
    tell("two")
    if closed != "reader":
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer) if closed == "none" else None
    stream.close()  # what lies in its buffer is no error at exit either


def test_the_command_hands_the_time_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import argparse

    monkeypatch.setenv(ranks.HANG_VARIABLE, "1h")
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(LaunchError, match="a hang of 'soon'"):
        command.act(parser.parse_args(["--workers", "1", "--hang", "soon", __file__]))
