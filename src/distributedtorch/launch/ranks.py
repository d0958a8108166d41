"""The processes of one run on this host: their environment, their start, and what ends with what.

Every rank begins as a tiny shim that asks the kernel for SIGKILL when the supervisor dies, makes sure that it has not
died already, and becomes the user's command. Every rank leads a session of its own, so one signal to its process group
reaches its data workers too. A rank that has ended stays a zombie until the group is cleared, so that its number cannot
come to mean another process.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.launch import private

_SHIM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"dtorch: cannot start {sys.argv[2]}: {error.strerror}")
"""


KEPT, KEPT_VARIABLE, ATTEMPT_VARIABLE = "kept", "DISTRIBUTEDTORCH_KEPT", "DISTRIBUTEDTORCH_ATTEMPT"
"""The folder that outlives a start of all ranks, who says where it is, and who says which start this is."""

AFTER_MAIN = "DISTRIBUTEDTORCH_AFTER_MAIN"
"""Says of ranks above 0 that they begin when rank 0 has come to its first call that needs them, and why."""


HANG_VARIABLE, HANG_WITH_RESTARTS = "DISTRIBUTEDTORCH_HANG", "10min"
"""How long a rank waits for one that does not come, and how long where the job is then started again."""
_HANG = "30min"
_UNITS = {"s": 1, "min": 60, "h": 3600}


class Process(Protocol):
    """What is asked of a started process."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> object: ...


@dataclass
class Rank:
    """One started process."""

    number: int
    process: Process
    pidfd: int
    """Becomes readable when the process ends."""
    log: Path | None
    """Where its output goes; None: the terminal."""
    status: int | None = None
    """Exit code, or minus the signal that killed it; None while it runs."""
    ended: float | None = None
    """Monotonic time at which its end was seen."""
    stopped: bool = False
    """Whether the supervisor has sent it a signal."""
    joined: bool = False
    """Whether its script has called dt.distribute."""

    def look(self) -> int | None:
        """Take note of an end without giving the process number back."""
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.status

    def send(self, number: int) -> None:
        """Signal the process; its whole group for SIGKILL."""
        self.stopped = self.stopped or self.status is None
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def clear(self) -> None:
        """End what is left of its group, data workers above all, and give the process number back."""
        self.send(signal.SIGKILL)
        self.process.wait()
        os.close(self.pidfd)


def start(number: int, command: list[str], environ: Mapping[str, str], folder: Path) -> Rank:
    """Start one rank. Rank 0 has the terminal, the others write `rank<number>.log`."""
    shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
    if number == 0:
        process = subprocess.Popen(shim, env=environ, start_new_session=True)
        return Rank(number, process, os.pidfd_open(process.pid), None)
    log = folder / f"rank{number}.log"
    with open(private.create(log, os.O_WRONLY | os.O_APPEND), "ab") as out:
        process = subprocess.Popen(
            shim, env=environ, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    return Rank(number, process, os.pidfd_open(process.pid), log)


def restarts_asked() -> int:
    """What `DISTRIBUTEDTORCH_RESTARTS` says, for scripts that start their workers themselves."""
    text = os.environ.get("DISTRIBUTEDTORCH_RESTARTS", "0")
    if not text.isdecimal():
        do = "set it to how often ranks may be started again, or unset it"
        raise LaunchError(explain(f"DISTRIBUTEDTORCH_RESTARTS={text!r}", "a whole number, 0 or more", do))
    return int(text)


def hang_asked() -> float:
    """After how many seconds of waiting for a rank that does not come the job ends: `DISTRIBUTEDTORCH_HANG`."""
    text = os.environ.get(HANG_VARIABLE, _HANG)
    if text == "off":
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", text)
    if found is None or float(found[1]) == 0:
        do = "give --hang 5min, or set DISTRIBUTEDTORCH_HANG=5min"
        raise LaunchError(explain(f"a hang of {text!r}", "a time above 0 in s, min or h, or off", do))
    return float(found[1]) * _UNITS[found[2]]


def environment(number: int, workers: int, port: int, folder: Path, plan: str | None) -> dict[str, str]:
    """What a rank finds in its environment: its place, loopback for torch's sockets, its share of the cores."""
    env = {name: value for name, value in os.environ.items() if name not in (KEPT_VARIABLE, ATTEMPT_VARIABLE)}
    env |= {
        "RANK": str(number),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTRIBUTEDTORCH_RUN": str(folder),
    }
    if plan is not None:
        env["DISTRIBUTEDTORCH_RUN_PLAN"] = plan
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
        env["DISTRIBUTEDTORCH_THREADS"] = "divided"
    return env
