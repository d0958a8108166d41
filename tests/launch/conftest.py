"""A run of real processes, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("job.py")
SECONDS = 60.0  # a guard against hangs on a busy machine; what is promised is asserted by each test


class Run:
    """One `dtorch run` (or another command) in a folder of its own, its processes marked by an environment variable."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder, self.marker = folder, f"DTORCH_TEST={uuid.uuid4().hex}"
        name, _, value = self.marker.partition("=")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, name: value, "PYTHONFAULTHANDLER": ""},
            stdin=subprocess.DEVNULL,
            stdout=(folder / "out").open("wb"),
            stderr=(folder / "err").open("wb"),
            preexec_fn=_as_from_a_shell,  # noqa: PLW1509
        )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, and fail with the output if the run ends first."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.005)

    def until_running(self) -> None:
        self.until(lambda: "running" in self.out)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for its end; a run killed by a signal gives minus the signal."""
        return self.process.wait(seconds)

    def seconds_since_fault(self) -> float:
        return time.monotonic() - float((self.folder / "fault").read_text())

    def left(self) -> list[int]:
        """The processes of this run that still live, zombies not counted."""
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is_ours(pid)]

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _is_ours(self, pid: int) -> bool:
        try:
            return self.marker.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _as_from_a_shell() -> None:
    """pytest may itself have been started with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs; whatever is left of them at the end of the test is killed."""
    runs: list[Run] = []

    def start(*command: object) -> Run:
        runs.append(Run([sys.executable, *map(str, command)], tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.left():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.fixture
def job(start: Callable[..., Run]) -> Callable[..., Run]:
    """Start the job of these tests under `dtorch run` with one fault at one rank."""

    def job(fault: str, rank: int = 1, workers: int = 2, *options: object) -> Run:
        return start("-m", "distributedtorch", "run", "--workers", workers, *options, JOB, fault, rank)

    return job
