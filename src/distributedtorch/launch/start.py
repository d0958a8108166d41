"""Becoming part of a world: what `import distributedtorch` prepares and the first call that needs others completes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core import where
from distributedtorch.core.comm import Comm
from distributedtorch.core.shared import share
from distributedtorch.core.step import Loop
from distributedtorch.core.world import BEFORE_LEAVING, World, accelerator, here, set_here
from distributedtorch.elastic import watch
from distributedtorch.launch import adopt, private, prompt, ranks, record, reserve
from distributedtorch.launch import folder as folders
from distributedtorch.launch.join import WORKERS, client, group_store, join, let_main_first, part, regroup
from distributedtorch.launch.place import Place, find
from distributedtorch.launch.reminder import reminding

_SECONDS_TO_WAIT, _SECONDS_FOR_WATCH = 1800.0, 60.0
"""How long a rank waits for others at least, in the back ends' own count, and for the watch to say who is missing."""
_LOGGED = "DISTRIBUTEDTORCH_LOGGED"
"""The process whose output goes to a log: those that it starts print where it wants them to."""
_SECONDS_WITHOUT_END = 30 * 86400.0


def prepare() -> Place:
    """At import: read this process's place, select its accelerator, send other ranks' output to the log folder."""
    place = find()
    set_here(
        World(
            rank=place.rank,
            size=place.world,
            local_rank=place.local_rank,
            local_size=place.local_world,
            joined=place.world == 1,
        )
    )
    record.install(place, partial(log_folder, place))
    prompt.install(place)
    reserve.hide_devices()
    if place.launcher == "none":
        return place
    if place.launcher == "dtorch" and folders.VARIABLE in os.environ:
        adopt.without_port(place, group_store)
    if accelerator() != "cpu":
        torch.accelerator.set_device_index(place.local_rank % torch.accelerator.device_count())
    if place.launcher != "dtorch" and place.world > 1:
        _to_log(place)
    if place.launcher in ("mpirun", "srun"):
        _share_cores(place)
    let_main_first(place)
    return place


@cache
def log_folder(place: Place) -> Path | None:
    """Where the output of ranks above 0 goes; None for one process."""
    if place.launcher == "none":
        return None
    torchrun = f"torchrun-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ.get('MASTER_PORT')}"
    return place.run_folder or private.home() / (place.job or torchrun).replace("/", "_")


def _share_cores(place: Place) -> None:
    """Divide the cores by the ranks of this host, unless the user or the starter's binding gives fewer."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    given = os.environ.get("SLURM_CPUS_ON_NODE", "") if place.launcher == "srun" else ""
    cores = int(given) if given.isdecimal() else os.cpu_count() or 1
    threads = max(1, min(cores // place.local_world, len(os.sched_getaffinity(0))))
    os.environ["OMP_NUM_THREADS"], os.environ["DISTRIBUTEDTORCH_THREADS"] = str(threads), "divided"
    torch.set_num_threads(threads)


def _to_log(place: Place) -> None:
    """Without a supervisor: standard output of ranks above 0 goes to a file; errors stay where they are shown."""
    folder = log_folder(place)  # also on rank 0, which names it: the script may change the working folder
    if place.rank == 0 or folder is None or _LOGGED in os.environ:
        return
    os.environ[_LOGGED] = str(os.getpid())
    log = private.create(private.folder(folder) / f"rank{place.rank}.log", os.O_WRONLY | os.O_APPEND, new=False)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.close(log)


def join_world() -> World:
    """Join the world this process was started in, once; one process has nothing to join."""
    world = here()
    if world.joined:
        return world
    place = find()
    with contextlib.suppress(ImportError):  # it ends, when Python does, what a server sends with: after what is below
        import zmq.utils.garbage  # noqa: F401
    adopt.before_destroy(_before_leaving)
    with reminding(place):
        join(place, device_type=accelerator(), timeout_seconds=_patience())
    _stand(world, place, client)
    world.joined = True
    return world


def _stand(world: World, place: Place, store: Callable[[], Store]) -> None:
    """The exchange with the others of a place's world, and the watch over it."""
    world.comm = Comm(place.rank, place.world)
    world.comm.share(*share(place.rank, place.world, store(), record.say))
    world.loop = Loop(world.comm)
    if world.comm.shared is not None:
        world.comm.shared.board.seconds_to_wait = _patience()
    atexit.register(world.comm.close)
    said = record.say if place.run_folder else None
    hang, excuse = ranks.hang_asked(), partial(_excuse, world)
    status = partial(_status, world)
    world.end_watch = watch.start(place, store, status, fail=record.fail, say=said, hang=hang, excuse=excuse)
    atexit.unregister(_before_leaving)
    atexit.register(_before_leaving)
    record.before_others()


def go_on_with(workers: int, local_workers: int) -> None:
    """The first processes go on as a world of their own, `local_workers` of them on this host. A group call of all.

    Nothing may be attached yet. The others are in no world afterwards.
    """
    world, place = join_world(), find()
    mine = replace(place, world=workers, local_world=local_workers) if place.rank < workers else None
    part(place.world)
    world.end_watch()
    atexit.unregister(world.comm.close)
    world.comm.close()
    regroup(mine, device_type=accelerator(), timeout_seconds=_patience())
    if mine is not None:
        world.size, world.local_size = workers, local_workers
        _stand(world, mine, lambda: client(within=WORKERS))


def _before_leaving() -> None:
    """Runs before the exchange, the watch and the group are closed: it was registered after them."""
    if not record.failed():
        while BEFORE_LEAVING:
            BEFORE_LEAVING.pop(0)()


def _status(world: World) -> watch.Status:
    waiting, step, count = world.comm.waiting, world.loop.steps, world.comm.count
    exchange, since, among = waiting if waiting else (None, None, world.comm)
    ranks = () if among.world == world.comm.world else tuple(among.members)
    at, busy = where.of_main_thread(), _busy(world, exchange or "")
    return watch.Status(exchange=exchange, where=at, since=since, step=step, count=count, ranks=ranks, busy=busy)


def _busy(world: World, exchange: str) -> str:
    """Why others may have to wait for this rank for long."""
    if where.at_prompt():
        return watch.AT_A_PROMPT
    if world.busy or exchange.startswith("save to "):
        return world.busy or "a save"
    return "" if record.has_stepped() else "its first step"


def _patience() -> float:
    """For how long an exchange waits by itself: the watch is to find a rank that does not come before, and say more."""
    return min(max(ranks.hang_asked(), _SECONDS_TO_WAIT) + _SECONDS_FOR_WATCH, _SECONDS_WITHOUT_END)


def _excuse(world: World, seconds: float) -> None:
    """Seconds of a wait that count for no limit."""
    if world.comm.shared is not None:
        world.comm.shared.board.seconds_to_wait += seconds
