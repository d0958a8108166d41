"""Faults of the exchange through shared memory on purpose: ranks killed or stopped, and `shared_limits`.

`python -m benchmarks.shared_faults [--kills 1000] [--stops 20] [--soak 10000000] [--limits] [--seed 0]` adds what was
asked for to benchmarks/results/shared_faults.json and exits with the number of faults found. One process imports torch
and forks the ranks of every run (`dt.launch`), so a run takes about a second. A rank is killed (kill -9) or stopped
(SIGSTOP) by a process of its own, at a moment that has nothing to do with what the rank does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import random
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.core.errors import RankError
from distributedtorch.core.world import here
from distributedtorch.launch.record import step_of

ROOT = Path(__file__).parents[1]
PLANS = ("ddp", "zero1", "zero2", "zero3")
MIB = 1 << 20
SECONDS_TO_END, SECONDS_TO_NAME, SECONDS_HUNG = 5.0, 1.0, 60
SECONDS_STOPPED = 1.5
AT_ONCE = "read up rest < /proc/uptime; echo $up > {mark}; kill -9 {pid}"
FOR_A_WHILE = (
    "read up rest < /proc/uptime; echo $up > {mark}; kill -STOP {pid}; sleep {stopped}; kill -CONT {pid}; : > {mark}.go"
)


class Noted(io.StringIO):
    """Standard error, with the time of every line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines += [(uptime(), line) for line in text.splitlines() if line]
        return len(text)

    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)


def uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Run:
    """What came of a run."""

    folder: Path
    noted: Noted
    value: Any = None
    """What rank 0 returned."""
    error: Exception | None = None
    ended: float = 0.0
    """When it was over."""
    faults: list[str] = field(default_factory=list)
    """What it has left behind."""

    def raised(self) -> list[str]:
        return [f"{type(self.error).__name__}: {self.error}"] if self.error else []


@contextlib.contextmanager
def ran(
    function: Callable[..., Any],
    *args: Any,
    workers: int,
    noted: Noted | None = None,
    shm: bool = True,
    seconds: float = SECONDS_TO_END,
) -> Iterator[Run]:
    """A run in an empty folder, which the block may look at.

    Args:
        function: What the ranks do, with `args`.
        workers: How many there are.
        noted: Takes what is printed.
        shm: Whether nobody else makes files in /dev/shm, so that new ones are left by this run.
        seconds: How long everything has to go.
    """
    with workplace() as folder:
        run = Run(folder, noted or Noted())
        before, fds = set(os.listdir("/dev/shm")), descriptors()
        try:
            with limited(SECONDS_HUNG), contextlib.redirect_stderr(run.noted), contextlib.redirect_stdout(run.noted):
                run.value = dt.launch(function, *args, workers=workers)
        except Exception as error:
            run.error = error
        run.ended = uptime()
        run.faults = leftovers(folder, before if shm else None, fds, seconds)
        yield run


def misnamed(run: Run, victim: int) -> list[str]:
    """Faults in how a run ended whose victim was killed."""
    if run.error is None:
        return ["nobody was missed"]
    if not isinstance(run.error, RankError):
        return run.raised()
    if run.error.rank != victim or "SIGKILL" not in str(run.error):
        return [f"named rank {run.error.rank}: {str(run.error).replace(str(run.folder), '.')[:600]}"]
    return []


def note_segments() -> None:
    """In a rank: leave word of the segments that it has mapped, for `leftovers`."""
    Path(f"segments.{dt.rank()}").write_text(" ".join(mapped("self")))


def train(plan: str, victim: int, act: str, delay: float) -> int:
    """A tiny model in a tight loop, until this is ended from outside or the stopped rank goes on.

    The victim is acted upon `delay` seconds after the loop began; below 0, so long after the ranks have joined.
    """
    mark = Path.cwd() / "mark"
    note_segments()
    words = act.format(pid=os.getpid(), mark=mark, stopped=SECONDS_STOPPED)
    command = ["/bin/sh", "-c", f"sleep {abs(delay):.4f}; {words}"]
    if dt.rank() == victim and delay < 0:  # while the ranks make themselves ready
        subprocess.Popen(command, start_new_session=True)
    model, optimizer = tiny()
    model, optimizer = dt.distribute(model, optimizer, plan=plan)
    if dt.rank() == victim and delay >= 0:
        subprocess.Popen(command, start_new_session=True)
    x, steps, until = torch.randn(4, 16), 0, time.monotonic() + SECONDS_HUNG
    while time.monotonic() < until:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if here().comm.exchange("go", torch.tensor([Path(f"{mark}.go").exists()])).any():
            return steps
    raise TimeoutError("nothing happened")


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters())


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A block that a run which hangs does not hold for ever."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def children() -> list[int]:
    """Processes of ours that live: this process adopts those whose parents have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def mapped(process: str) -> set[str]:
    """Inodes of the segments that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:distributedtorch" in line}


def holders(inodes: set[str]) -> list[str]:
    """Processes with one of these segments mapped, or with a descriptor of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [f"a segment in {process}"] if mapped(process.name) & inodes else []
        for link in process.glob("fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("/memfd:distributedtorch") and str(link.stat().st_ino) in inodes:
                    found.append(str(link))
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def leftovers(folder: Path, shm: set[str] | None, fds: int, seconds: float) -> list[str]:
    """What a run has left behind, once everything had time to go."""
    until = time.monotonic() + seconds
    while children() and time.monotonic() < until:
        time.sleep(0.005)
    faults = [f"process {pid} is left" for pid in children()]
    inodes = {inode for file in folder.glob("segments.*") for inode in file.read_text().split()}
    faults += [f"{what} is left" for what in holders(inodes)]
    faults += [f"/dev/shm/{name} is left" for name in set(os.listdir("/dev/shm")) - shm] if shm is not None else []
    faults += [f"{descriptors() - fds} descriptors of the caller are left"] if descriptors() > fds else []
    faults += ["a segment is still mapped in the caller"] if mapped("self") else []
    for path in folder.rglob("*"):
        kind = path.lstat().st_mode
        faults += [f"{path.name} is left"] if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind) else []
    return faults


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder to run in: logs of the runs go there, too."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(ROOT)


def kill_once(draw: random.Random) -> dict[str, Any]:
    world, plan = draw.randint(2, 4), draw.choice(PLANS)
    victim, delay = draw.randrange(world), draw.uniform(-0.05, 0.4)
    row: dict[str, Any] = {"ranks": world, "plan": plan, "victim": victim, "delay": round(delay, 4), "faults": []}
    with ran(train, plan, victim, AT_ONCE, delay, workers=world) as run:
        row["faults"] += misnamed(run, victim)
        row["seconds"] = run.ended - float((run.folder / "mark").read_text() or "nan")
        row["step"] = max([step_of(one, victim) or 0 for one in run.folder.glob(".dtorch/*")], default=0)
        if row["seconds"] > SECONDS_TO_END:
            row["faults"].append(f"over after {row['seconds']:.1f} s")
        row["faults"] += run.faults
    return row


def kills(times: int, seed: int) -> dict[str, Any]:
    """So many runs, each with one rank killed."""
    draw, rows = random.Random(seed), []
    for number in range(times):
        rows.append(kill_once(draw))
        if rows[-1]["faults"]:
            print(f"  kill {number}: {rows[-1]}", flush=True)
        if number % 50 == 49:
            print(f"  {number + 1} kills, {sum(bool(row['faults']) for row in rows)} with faults", flush=True)
    bad, seconds = [row for row in rows if row["faults"]], [row["seconds"] for row in rows]
    inside = sum(row["step"] > 0 for row in rows)
    print(
        f"{times} kills ({inside} of them in the loop): {len(bad)} with faults; from the kill to the end median "
        f"{statistics.median(seconds):.2f} largest {max(seconds):.2f} s"
        + ("" if bad else f"; 0 of {times}: {rate(times)}")
    )
    summary = {"in_loop": inside, "seconds": [statistics.median(seconds), max(seconds)]}
    return {"times": times, "seed": seed, "faults": len(bad), "bound": rate(times), **summary, "bad": bad}


def rate(times: int) -> str:
    return f"supports a rate below {3 / times:.2g} (95%)"


def said_stopped(run: Run) -> list[tuple[float, str]]:
    return [(at, line) for at, line in run.noted.lines if "is stopped" in line]


def unnamed(run: Run, victim: int, stopped: float, seconds: float = SECONDS_TO_NAME) -> list[str]:
    """Faults in what a run said of its victim, stopped at a time."""
    said = said_stopped(run)
    late = ["not named in time"] if not said or said[0][0] - stopped > seconds else []
    return late + [line for _, line in said if f"rank {victim} is stopped" not in line]


def stop_once(draw: random.Random) -> dict[str, Any]:
    world, plan = draw.randint(2, 4), draw.choice(PLANS)
    victim, delay = draw.randrange(world), draw.uniform(0.1, 0.5)
    row: dict[str, Any] = {"ranks": world, "plan": plan, "victim": victim, "faults": []}
    with ran(train, plan, victim, FOR_A_WHILE, delay, workers=world) as run:
        row["faults"] += run.raised()
        row["steps"] = run.value
        stopped = float((run.folder / "mark").read_text() or "nan")
        row["seconds"] = [round(at - stopped, 2) for at, _ in said_stopped(run)]
        row["faults"] += [*unnamed(run, victim, stopped), *run.faults]
    return row


def stops(times: int, seed: int) -> dict[str, Any]:
    """So many runs, each with one rank stopped for a while."""
    draw = random.Random(seed)
    rows = [stop_once(draw) for _ in range(times)]
    bad = [row for row in rows if row["faults"]]
    first = [row["seconds"][0] for row in rows if row["seconds"]]
    print(f"{times} stops: {len(bad)} with faults; named after {min(first, default=0)} to {max(first, default=0)} s")
    for row in bad:
        print(f"  {row}")
    return {"times": times, "seed": seed, "faults": len(bad), "bound": rate(times), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int)
    parser.add_argument("--stops", type=int)
    parser.add_argument("--soak", type=int, nargs="?", const=100_000)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from benchmarks.shared_limits import limits, soak
    from benchmarks.step_time import machine

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    path = ROOT / "benchmarks/results/shared_faults.json"
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    parts |= {"limits": limits} if given.limits else {}
    parts |= {"kills": lambda: kills(given.kills, given.seed)} if given.kills else {}
    parts |= {"stops": lambda: stops(given.stops, given.seed)} if given.stops else {}
    parts |= {"soak": lambda: soak(given.soak)} if given.soak else {}
    with workplace():
        dt.launch(dt.rank, workers=2)  # the first run of a process opens what stays open
    failed = 0
    for name, run in parts.items():
        about = machine() | {"command": " ".join(["python -m benchmarks.shared_faults", *sys.argv[1:]])}
        result = {"machine": about, **run()}
        failed += result["faults"]
        results = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**results, name: result}, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
