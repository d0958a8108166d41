"""While a rank waits for the others at the start: a line every minute that says for whom, and where."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from distributedtorch.core import where
from distributedtorch.launch import record
from distributedtorch.launch.join import client
from distributedtorch.launch.place import Place

_SECONDS_BETWEEN_LINES = 60.0


@contextlib.contextmanager
def reminding(place: Place) -> Iterator[None]:
    """A block in which this rank waits for the others to call `dt.distribute`."""
    over = threading.Event()
    thread = threading.Thread(target=_remind, args=(place, over), name="distributedtorch-reminder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _remind(place: Place, over: threading.Event) -> None:
    began = time.monotonic()
    with contextlib.suppress(RuntimeError):  # where they meet is gone: the main thread says so
        while not over.wait(_SECONDS_BETWEEN_LINES):
            text = missing(place)
            if text and not over.is_set():
                record.say(f"{text} (for {time.monotonic() - began:.0f} s, at {where.of_main_thread()})")


def missing(place: Place) -> str:
    """For whom a rank waits; empty where another one says it."""
    if not record.has_reached():
        return f"rank {place.rank} of {place.world} waits for the others{_from_outside(place)}"
    store = client()
    there = [rank for rank in range(place.world) if store.check([f"joined/{rank}"])]
    late = [str(rank) for rank in range(place.world) if rank not in there]
    if not late or place.rank != there[0]:
        return ""
    return f"rank {place.rank} waits for rank {', '.join(late)} of {place.world} to call dt.distribute"


def _from_outside(place: Place) -> str:
    if place.launcher != "torchrun":
        return ""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f" at {address} (RANK and WORLD_SIZE are set: start all of them, or unset these to run one process)"
