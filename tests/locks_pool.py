"""What each process of a pool runs: a counter in a file that every rank raises, readers together, a lock not to be had.

`locks_pool.py FOLDER [sabotage]`: faults raise; with `sabotage` the lock holds nobody back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

import distributedtorch as dt

ROUNDS = 15
Lock = Callable[..., AbstractContextManager[None]]


def count(folder: Path, lock: Lock) -> None:
    """Nobody reads between another's reading and writing."""
    file = folder / "count"
    if dt.is_main():
        file.write_text("0")
    dt.barrier()
    for _ in range(ROUNDS):
        with lock("count"):
            number = int(file.read_text() or "0")
            time.sleep(0.001)
            file.write_text(str(number + 1))
    dt.barrier()
    found, expected = int(file.read_text()), ROUNDS * dt.world()
    assert found == expected, f"{found} of {expected} counted"


def read(folder: Path) -> None:
    """All ranks read at once, and see either all or nothing of what a writer does."""
    with dt.lock("shared", read=True):
        dt.barrier()
    for number in range(5):
        if dt.is_main():
            with dt.lock("shared"):
                for name in ("one", "two"):
                    (folder / name).write_text(str(number))
                    time.sleep(0.002)
        else:
            with dt.lock("shared", read=True):
                seen = [(folder / name).read_text() if (folder / name).exists() else "" for name in ("one", "two")]
                assert seen[0] == seen[1], seen


def give_up() -> None:
    """Whoever gives up is told who has the lock."""
    if dt.is_main():
        with dt.lock("busy"):
            dt.barrier()
            dt.barrier()
    else:
        dt.barrier()
        said = r"lock 'busy' at .*give_up\(\): rank 0 holds it since \d\d:"
        with pytest.raises(dt.LockError, match=said) as caught, dt.lock("busy", timeout=0.1):
            pass
        assert "give_up()" in str(caught.value).split("rank 0 holds it")[1]
        dt.barrier()
    with dt.lock("busy", timeout=10):
        pass


def main(folder: Path) -> None:
    sabotage = "sabotage" in sys.argv
    count(folder, (lambda name: nullcontext()) if sabotage else dt.lock)
    read(folder)
    give_up()
    assert dt.stats().exchanges["lock"] >= ROUNDS
    dt.print("one at a time")


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
