"""The script the launch tests run: joins through distributedtorch, all-reduces in a loop, and has one fault on demand.

Usage: job.py FAULT RANK, in a folder of its own. Writes `pid.<rank>` when joined and `fault` (the time) at the fault.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distributedtorch.core.errors import PeerError
from distributedtorch.core.plan import Plan
from distributedtorch.launch import join, place, record

FAULT, RANK = sys.argv[1], int(sys.argv[2])
STEPS, AT = 200_000, 5


def explode() -> None:
    raise ValueError("a bad sample")


def fault(here: place.Place) -> None:
    """Called on one rank, at one step."""
    Path("fault").write_text(str(time.monotonic()))
    if FAULT == "raise":
        explode()
    if FAULT == "raise-lingering":  # a thread keeps the process alive after the error
        import threading

        threading.Thread(target=time.sleep, args=(60,)).start()
        explode()
    if FAULT == "exit":
        sys.exit(3)
    if FAULT == "hard-exit":
        os._exit(4)
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "foreign-hook":
        sys.excepthook = lambda *_: None
        explode()
    if FAULT == "in-handler":  # the user's error is the cause, though a lost peer was met while handling it
        try:
            explode()
        finally:
            raise PeerError("met while cleaning up")


def refused() -> None:
    """What every rank is told."""
    Plan.of("zebra").check(2)


def loop(here: place.Place) -> None:
    steps = 20 if FAULT == "none" else STEPS
    for step in range(1, steps + 1):
        if here.rank == RANK and step == AT + 1:
            if FAULT == "leave":
                Path("fault").write_text(str(time.monotonic()))
                return
            fault(here)
        if FAULT == "refused" and step == AT + 1:
            refused()
        record.note(step)
        dist.all_reduce(torch.ones(4))
        if here.rank == 0 and step == AT * 2:
            print("running", flush=True)


def main() -> None:
    here = place.find()
    if FAULT == "unjoined":
        return
    if FAULT == "unjoined-one" and here.rank == RANK:
        return
    join.join(here, device_type="cpu")
    data = iter(DataLoader(list(range(100_000)), num_workers=2)) if FAULT in ("data", "interrupt-data") else None
    if data is not None:
        next(data)
    Path(f"pid.{here.rank}").write_text(str(os.getpid()))
    if FAULT == "evaluate":
        if here.rank == 0:
            while not Path("go").exists():
                time.sleep(0.01)
            print("evaluated", flush=True)
        return
    loop(here)


if __name__ == "__main__":
    main()
