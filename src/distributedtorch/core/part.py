"""Exchanges between some of the job's ranks: replicas that divide what each of them holds (`replicate`).

N ranks in R replicas: groups of S = N/R neighbours, which lie on one host where hosts have as many ranks or a multiple,
and S groups of the R ranks that have the same place in them. A part is a `Comm` of its own, in which a rank is its
place; it counts, waits and keeps memory together with the whole, and errors name the job's ranks. It goes through
shared memory where all its ranks are on one host, else over gloo in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from distributedtorch.core import nccl
from distributedtorch.core.comm import Comm
from distributedtorch.core.listeners import sealed

APART = "its ranks are on several hosts"


def parts(whole: Comm, replicas: int) -> tuple[Comm, Comm]:
    """The ranks that divide a replica with this one, and those with its place in the other replicas. A group call."""
    size = whole.world // replicas
    inside = [range(first, first + size) for first in range(0, whole.world, size)]
    across = [range(place, whole.world, size) for place in range(size)]
    return part(whole, inside, f"inside {replicas}"), part(whole, across, f"across {replicas}")


def part(whole: Comm, groups: Sequence[Sequence[int]], label: str) -> Comm:
    """This rank's group as a `Comm`; no other groups may have the label. A group call."""
    members = next(group for group in groups if whole.rank in group)
    made = Comm(members.index(whole.rank), len(members))
    made.whole, made.members = whole, members
    made.traffic, made.before_waiting, made.pool = whole.traffic, whole.before_waiting, whole.pool
    made.pairs = whole.pairs.part(members, label)
    made.beside = whole.hosts
    near = whole.hosts.near if whole.hosts is not None else whole.members
    if whole.shared is not None and set(members) <= set(near):
        made.shared = whole.shared.part([near.index(rank) for rank in members], label)
    else:
        made.unshared = whole.unshared or APART
    if nccl.is_there():
        bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
        with sealed(also_nccl=bound):
            known = [(ranks, dist.new_group(list(ranks))) for ranks in groups]  # every rank has to make all of them
        made.group = next(group for ranks, group in known if ranks is members)
    return made


def everywhere(comm: Comm, bounds: Sequence[int]) -> Sequence[int]:
    """The bounds of pieces of a part of neighbours, for all ranks of the job: those outside own nothing."""
    before, after = comm.members[0], comm.whole.world - 1 - comm.members[-1]
    return [bounds[0]] * before + [*bounds] + [bounds[-1]] * after


def copy_of(comm: Comm) -> tuple[int, int]:
    """Which of how many equal parts of neighbours this one is: all of them hold the same."""
    return comm.members[0] // comm.world, comm.whole.world // comm.world
