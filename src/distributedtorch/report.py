"""The one printed line: what was made of the request, and where each value came from."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import tell
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import World, accelerator
from distributedtorch.data.loader import Loader
from distributedtorch.launch import heap, reserve
from distributedtorch.launch.place import find
from distributedtorch.launch.start import log_folder
from distributedtorch.sync.divided import ALL
from distributedtorch.wire.hosts import spoken

_THREADS = {"divided": " (cores divided by workers)", "forked": " (a forked process can have no more)"}


def line(
    plan: Plan,
    origin: dict[str, str],
    world: World,
    loaders: list[Loader],
    *,
    batchnorms: int,
    workers: int | None,
    own: bool = False,
) -> None:
    """Print the line on rank 0's standard error."""
    if world.rank == 0:
        said = parts(plan, origin, world, loaders, batchnorms=batchnorms, workers=workers)
        if own and world.size > 1:
            said.insert(2, f"each rank draws batches of its own: {world.size} times the batch")
        say(world, " · ".join(said))


def met(loader: Loader, *, trial: bool) -> str:
    """What was made of a loader that was met in the loop."""
    rest = ", after its first batch: give it to dt.distribute and iterate what comes back" if trial else ""
    return f"batch {loader.note} (the loader that feeds the loop{rest})"


def say(world: World, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if world.rank == 0:
        tell(f"distributedtorch: {text}")


def parts(
    plan: Plan, origin: dict[str, str], world: World, loaders: list[Loader], *, batchnorms: int, workers: int | None
) -> list[str]:
    """The line's parts, in order."""
    said = [_workers(world, plan, workers), f"plan {_words(plan, origin)}"]
    said += [f"batch {loader.note}" for loader in loaders]
    said += [f"{batchnorms} BatchNorm synchronised{'' if plan.lockstep else ' at first'}"] if batchnorms else []
    said += [reserve.spoken()] if reserve.spoken() else []
    if world.size > 1:
        said.append(f"{_exchange(world)} on {_devices(world)}")
        said += [_replicas(plan, world)] if plan.replicas > 1 else []
        said += [f"wire {spoken(world.comm)}"] if "across" in plan.options("wire") else []
        said += [f"blocks through host memory ({reason})" for reason in _unreached()]
        divided = _THREADS.get(os.environ.get("DISTRIBUTEDTORCH_THREADS", ""), "")
        said.append(f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each{divided}")
        said += [heap.spoken()] if heap.spoken() else []
        folder = log_folder(find())
        said += [f"other ranks' output in {_from_here(folder)}"] if folder else []
    return said


def _from_here(folder: Path) -> str:
    """A folder as seen from the working folder, where it lies under that."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(folder)


def _workers(world: World, plan: Plan, workers: int | None) -> str:
    if world.size == 1 and not world.servers:
        return "1 process"
    launcher = find().launcher
    source = os.environ.get("DISTRIBUTEDTORCH_WORKERS_SOURCE", "command line" if launcher == "dtorch" else launcher)
    asked = "" if workers in (None, world.size + world.servers) else f", not {workers} as in the call"
    counts = [(world.size, "worker"), (world.servers if plan.apart else 0, "server")]
    said = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)
    return f"{said} ({source}{asked})"


def _exchange(world: World) -> str:
    """What the ranks exchange through."""
    backend = str(dist.get_backend())
    if backend != "gloo":
        return backend
    if world.comm.hosts:
        return f"shared memory inside {len(world.comm.hosts.groups)} hosts, gloo across,"
    return "shared memory" if world.comm.shared else f"gloo (no shared memory: {world.comm.unshared})"


def _replicas(plan: Plan, world: World) -> str:
    """Who has what, and how it goes from one to the other."""
    inside, across = world.parts(plan.replicas)
    each = "1 rank" if inside.alone else f"{inside.world} ranks, {_way(inside)} inside"
    return f"{plan.replicas} replicas of {each}, {_way(across)} across"


def _way(part: Comm) -> str:
    backend = str(dist.get_backend())
    if backend != "gloo":
        return backend
    return "shared memory" if part.shared else "gloo"


def _devices(world: World) -> str:
    """Where what is trained lives."""
    found = {param.device.type for member in world.loop.members for param in member.sync.params}
    return " and ".join(sorted(found)) or accelerator()


def _unreached() -> set[str]:
    """Why ranks cannot read each other's GPU memory, where parameters are divided over GPUs."""
    return {memory.pull.unreached for memory in ALL if memory.pull.unreached}


def _words(plan: Plan, origin: dict[str, str]) -> str:
    starter = os.environ.get("DISTRIBUTEDTORCH_WORKERS_SOURCE", "")
    from_ = {"command line": starter} if starter == "dt.launch" else {}
    sources = {name: from_.get(source, source) for name, source in origin.items()}
    return ", ".join(f"{word} ({sources.get(word.name, 'default')})" for word in plan.words) or "ddp (default)"
