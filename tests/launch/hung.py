"""What the tests of hangs run in each rank: `hung.py CASE`. Time runs five times as fast for the watch.

- lost: rank 1 loops, rank 2 is stopped, and the others wait in an exchange.
- busy: what each rank says of itself where others may have to wait for it; and rank 0 debugs.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.elastic import watch
from distributedtorch.launch import record, start
from distributedtorch.launch.join import client


def stuck() -> None:
    while True:
        time.sleep(0.05)


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def told(rank: int) -> str:
    """What a rank has said last that it is busy with."""
    return watch._decode(client().get(f"watch/{rank}")).busy


def lost() -> None:
    record.note(1)
    until(lambda: not any(told(rank) for rank in range(dt.world())))
    if dt.rank() == 1:
        stuck()
    if dt.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    dt.barrier()


def busy_with() -> str:
    return start._status(here()).busy


def at_prompt(act: Callable[[], object]) -> None:
    """Call a function as from the module of Python's prompt."""
    FunctionType(called.__code__, {"__name__": "code"})(act)


def called(act: Callable[[], object]) -> None:
    act()


def debugs() -> None:
    """Rank 0 is at a prompt until rank 1 waits for that in `breakpoint()`; the last rank waits in an exchange."""

    def leave() -> None:
        until(lambda: told(1) == watch.AT_A_PROMPT)
        Path("left").touch()

    if dt.rank() == 0:
        at_prompt(leave)
    if dt.rank() == 1:
        breakpoint()
        assert Path("left").exists(), "rank 1 did not wait"
    dt.barrier()


def comes_to_no_prompt() -> None:
    """Rank 1 alone calls `breakpoint()`, and the others wait for it."""
    if dt.rank() == 1:
        breakpoint()
    dt.barrier()


def busy() -> None:
    found = [busy_with()]
    record.note(1)
    found.append(busy_with())
    with dt.main_first():
        found.append(busy_with())
    with here().comm.held("save", "save to a slow disk"):
        found.append(busy_with())
    at_prompt(lambda: found.append(busy_with()))
    assert found == ["its first step", "", "dt.main_first", "a save", watch.AT_A_PROMPT], found
    dt.barrier()
    debugs()
    comes_to_no_prompt()
    print("came to its end", flush=True)


if __name__ == "__main__":
    for name in ("BETWEEN_BEATS", "TO_SUSPECT", "TO_REPORT", "STALE", "TO_AGREE"):
        setattr(watch, f"_SECONDS_{name}", getattr(watch, f"_SECONDS_{name}") / 5)
    if "deaf" in sys.argv:
        watch.until_past_prompt = lambda *_: None
    dt.barrier()
    {"busy": busy, "lost": lost}[sys.argv[1]]()
