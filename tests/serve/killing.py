"""Kills of ranks in mid-run, one after the other, in one job that is started again each time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.serve import counted

ROOT = Path(__file__).parents[2]
SECONDS = 90.0
MORE = 20
"""Answers that every rank has to have had before the next kill."""


def killed(folder: Path, plan: str, victims: Sequence[int], seed: int, sabotage: str = "") -> list[str]:
    """Run the counting job, kill these processes one after the other, and say what is wrong at the end."""
    draw = random.Random(seed)
    processes = counted.WORLD + ("apart" in plan)
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(processes)]
    command += ["--restarts", str(len(victims)), str(ROOT / "tests/serve/counted.py"), str(folder), plan, sabotage]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "out").open("wb") as out:
        job = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)
    try:
        before = [0] * counted.WORLD
        for attempt, victim in enumerate([*victims, None]):
            there = [folder / f"pid.{attempt}.{rank}" for rank in range(processes)]
            _until(job, lambda there=there: all(path.exists() and path.read_text() for path in there), SECONDS)  # type: ignore[misc]
            _until(
                job,
                lambda b=before: all(n > m + MORE for n, m in zip(counted.answered(folder), b, strict=True)),
                SECONDS,
            )  # type: ignore[misc]
            if victim is not None:
                time.sleep(draw.random() * 0.05)
                os.kill(int(there[victim].read_text()), signal.SIGKILL)
            before = list(counted.answered(folder))
        counted.stop(folder)
        code = job.wait(SECONDS)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(SECONDS)
    said = [] if code == 0 else [f"the job ended with code {code}: {(folder / 'out').read_text()[-2000:]}"]
    return said + counted.faults(folder)


def _until(job: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the job ended with code {job.poll()}, or took longer than {seconds:g} s")
        time.sleep(0.002)
