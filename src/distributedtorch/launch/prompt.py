"""`breakpoint()` in several processes: rank 0 has the prompt, the others wait until it is left.

The others go on as soon as rank 0 has left its prompt, or waits for them in an exchange: a step over `loss.backward()`
needs all ranks. A rank at a prompt, and those that wait for it, are busy to the watch: nobody is late, nothing hangs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from functools import partial
from typing import Any

from distributedtorch.core import where
from distributedtorch.core.world import here
from distributedtorch.elastic import watch
from distributedtorch.launch import record
from distributedtorch.launch.join import client
from distributedtorch.launch.place import Place

_AT_TERMINAL = ("", "pdb", "ipdb", "pudb", "IPython")
"""Debuggers that read from the terminal; others, such as remote ones, are left to every rank."""


def install(place: Place) -> None:
    """Have `breakpoint()` on a rank above 0 wait for rank 0, unless somebody has replaced it already."""
    if place.rank > 0 and sys.breakpointhook is sys.__breakpointhook__ and _needs_terminal():
        sys.breakpointhook = partial(_stay, place)


def _needs_terminal() -> bool:
    return os.environ.get("PYTHONBREAKPOINT", "").partition(".")[0] in (*_AT_TERMINAL, "0")


def _stay(place: Place, *args: Any, **options: Any) -> Any:
    """What `breakpoint()` does on a rank above 0."""
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return None
    if not _needs_terminal():
        return sys.__breakpointhook__(*args, **options)
    line, world = where.of_frame(sys._getframe(1)), here()
    said = f"breakpoint() at {line}: rank 0 has the prompt, and rank {place.rank} waits until it is left"
    if not world.joined:
        record.say(said)
        return None
    before, world.busy = world.busy, watch.AT_A_PROMPT
    try:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            store, mine = client(), str(place.rank)
            if store.compare_set(f"prompt/{zlib.crc32(line.encode())}", "", mine).decode() == mine:
                record.say(said.replace(f"rank {mine} waits", "the others wait"))
            watch.until_past_prompt(store, 0)
    finally:
        world.busy = before
    return None
