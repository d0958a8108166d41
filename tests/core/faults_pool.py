"""Runs with faults on purpose, in ranks forked from one process: as `benchmarks/shared_faults.py`, at known moments.

`python -m tests.core.faults_pool` reads lines `CASE RANKS [WORDS]`, and answers each with a list (JSON) of what is
wrong about that run. Words make it a harder one, or the sabotaged twin that must be found wrong: SABOTAGE.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import distributedtorch as dt
from benchmarks.shared_faults import (
    SECONDS_TO_END,
    Noted,
    children,
    misnamed,
    note_segments,
    ran,
    said_stopped,
    tiny,
    unnamed,
    uptime,
    workplace,
)
from benchmarks.shared_limits import learn, no_memfd, rows, steps
from distributedtorch.core import segment
from distributedtorch.core.segment import Board
from distributedtorch.core.shared import Shared
from distributedtorch.core.world import here
from distributedtorch.launch import record, supervise
from tests.core.shared_pool import compare, drop_last

SECONDS_TO_NAME = 2.0
"""Promised is a second; this machine may have other things to do."""
HARDER = ("refused", "data-workers", "old-kernel")
UNKNOWN = 9999
"""No kernel has a call of this number."""


def not_followed() -> None:
    Board._first = lambda self, ended: ended  # type: ignore[method-assign]


def blind() -> None:
    """A stopped rank is not seen; so that this run ends, too, it is let go on without a word."""
    stopped = segment.is_stopped

    def is_stopped(pid: int) -> bool:
        if stopped(pid) and uptime() - marked()[0] > SECONDS_TO_NAME:
            os.kill(pid, signal.SIGCONT)
        return False

    segment.is_stopped = is_stopped


def orphan() -> None:
    """A process with the segments in it stays when its rank goes; for a minute, should nobody end it."""
    if dt.rank() == 0 and not os.fork():
        os.setsid()
        signal.alarm(60)
        signal.pause()


def silent() -> None:
    here().comm.unshared = ""


def drop() -> None:
    Shared.sum_range = drop_last(Shared.sum_range)  # type: ignore[method-assign]


def restless() -> None:
    """A wait that the kernel refuses is taken for one that is over: who waits turns in circles."""
    ctypes.get_errno = lambda: errno.EAGAIN


SABOTAGE: dict[str, Callable[[], None]] = {
    "not-followed": not_followed,
    "blind": blind,
    "orphan": orphan,
    "silent": silent,
    "drop": drop,
    "restless": restless,
}
"""What a word breaks, in every rank."""


def sabotage(words: list[str]) -> None:
    for word in words:
        if word not in HARDER:
            SABOTAGE[word]()


class Late:
    """The ends of the others as a rank sees them that looks when all have ended."""

    def __init__(self, ends: select.poll, others: int) -> None:
        self.ends, self.others = ends, others

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        found = self.ends.poll(timeout)
        return found if len(found) == self.others else []


def sums(number: signal.Signals, victim: int, words: list[str]) -> None:
    """In a rank: three sums; the victim gets a signal inside the second, when the others wait for its range."""
    sabotage(words)
    note_segments()
    comm = here().comm
    assert comm.shared is not None, comm.unshared
    if comm.world > 2 and comm.rank == comm.world - 2:
        comm.shared.board._ends = Late(comm.shared.board._ends, comm.world - 1)  # type: ignore[assignment]
    for turn in range(3):
        if turn == 1 and comm.rank == victim:
            strike(number)
        add(1000)


def strike(number: signal.Signals) -> None:
    """Send this process a signal in the middle of its next sum."""
    sum_range = Shared.sum_range

    def struck(self: Shared, parts: list[Tensor], out: Tensor) -> None:
        Shared.sum_range = sum_range  # type: ignore[method-assign]
        Path("mark").write_text(f"{uptime()} {os.getpid()}")
        os.kill(os.getpid(), number)
        sum_range(self, parts, out)

    Shared.sum_range = struck  # type: ignore[method-assign]


def marked() -> tuple[float, int]:
    """When the victim got its signal (never: nan), and its process."""
    at, pid = Path("mark").read_text().split() if Path("mark").exists() else ("nan", "0")
    return float(at), int(pid)


def add(numel: int) -> None:
    comm = here().comm
    flat = torch.full((numel,), float(comm.rank + 1))
    comm.all_reduce("sum", flat, [numel * k // comm.world for k in range(comm.world + 1)]).wait()
    assert (flat == comm.world * (comm.world + 1) / 2).all(), "a wrong sum"


def killed(world: int, words: list[str]) -> list[str]:
    """All survivors must name the last rank; of three or more, one that looks when the others have left, too."""
    victim = world - 1
    with ran(sums, signal.SIGKILL, victim, words, workers=world, shm=False, seconds=patience(words)) as run:
        faults = misnamed(run, victim) + run.faults
        seconds = run.ended - marked()[0]
        faults += [f"over after {seconds:.1f} s"] if seconds > SECONDS_TO_END else []
        folder = next(run.folder.glob(".dtorch/*"), run.folder)
        for rank in range(victim):
            end = record.read(folder, rank)
            said = end.message if end is not None else "nothing"
            faults += [] if f"rank {victim} is gone" in said else [f"rank {rank} said: {said}"]
    return faults


def patience(words: list[str]) -> float:
    """For what is known to stay nobody needs to wait."""
    return 0.2 if "orphan" in words else SECONDS_TO_END


class Continued(Noted):
    """Standard error; a rank that is said to be stopped may go on."""

    def write(self, text: str) -> int:
        if "is stopped" in text:
            os.kill(marked()[1], signal.SIGCONT)
        return super().write(text)


def stopped(world: int, words: list[str]) -> list[str]:
    """The others must name the first rank, once, and go on with it to the right sums."""
    with ran(sums, signal.SIGSTOP, 0, words, workers=world, noted=Continued(), shm=False) as run:
        faults = run.raised() + unnamed(run, 0, marked()[0], SECONDS_TO_NAME) + run.faults
        return faults + [line for _, line in said_stopped(run)[1:]]


def learned(world: int, words: list[str]) -> list[str]:
    """A few steps under zero2: the weights of one process, and what is exchanged through in the printed line.

    "refused": rank 1 gets no segment. "data-workers": two for each rank.
    """
    model, optimizer = tiny()
    truth = steps(model, optimizer, rows(0))

    def work() -> list[Tensor]:
        sabotage(words)
        note_segments()
        return learn(2 if "data-workers" in words else 0)

    refused = "refused" in words
    with no_memfd() if refused else contextlib.nullcontext(), ran(work, workers=world, shm=False) as run:
        faults = run.raised() + run.faults
        for mine, one in zip(run.value or [], truth, strict=not run.error):
            faults += [] if torch.allclose(mine, one, rtol=1e-4, atol=1e-6) else ["other weights than in one process"]
    through = "gloo (no shared memory: [Errno 1] Operation not permitted) on cpu" if refused else "shared memory on cpu"
    said = run.noted.text()
    return faults + ([] if f"{world} workers" in said and through in said else [f"it said: {said}"])


def exchanged(world: int, words: list[str]) -> list[str]:
    """Every kind of exchange to the bit. "old-kernel": one without futex_waitv, where ranks must sleep all the same."""

    def work() -> None:
        dt.barrier()
        if "old-kernel" in words:
            old_kernel()
        sabotage(words)
        note_segments()
        comm = here().comm
        assert comm.shared is not None, comm.unshared
        for serial, dtype in enumerate((torch.float32, torch.bfloat16)):
            compare(comm, 4099, dtype, serial, inside=serial == 0)
        until = time.monotonic() + 1
        while "old-kernel" in words and comm.rank == 0 and not Path("slept").exists() and time.monotonic() < until:
            time.sleep(0.001)  # the others wait for this rank
        add(1000)

    with ran(work, workers=world, shm=False) as run:
        awake = "old-kernel" in words and not (run.folder / "slept").exists()
        return run.raised() + run.faults + (["nobody slept"] if awake else [])


def old_kernel() -> None:
    """In a rank: no futex_waitv, and word of the sleeps that take its place."""
    segment._FUTEX_MANY = UNKNOWN  # type: ignore[misc]

    def sleep(seconds: float) -> None:
        Path("slept").touch()
        time.sleep(seconds)

    segment.time = SimpleNamespace(**{**vars(time), "sleep": sleep})  # type: ignore[assignment, attr-defined]


CASES: dict[str, Callable[[int, list[str]], list[str]]] = {
    "killed": killed,
    "stopped": stopped,
    "learned": learned,
    "exchanged": exchanged,
}


def main() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    supervise._SECONDS_TO_END, supervise._SECONDS_TO_KILL = 10.0, 12.0  # who cannot end by itself is found
    with workplace():
        dt.launch(dt.rank, workers=1)  # the first run of a process opens what stays open
    for line in sys.stdin:
        case, world, *words = line.split()
        faults = CASES[case](int(world), words)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        print(json.dumps(faults), flush=True)


if __name__ == "__main__":
    main()
