"""This process's place in the run, once it has one: rank, world, device, and the exchange that ties them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distributedtorch.core.comm import Comm
from distributedtorch.core.part import parts
from distributedtorch.core.pull import Pull
from distributedtorch.core.step import Loop


@dataclass
class World:
    """Everything a part may ask about the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    joined: bool = False
    """Whether the exchange with the other ranks stands."""
    comm: Comm = field(default_factory=lambda: Comm(0, 1))
    loop: Loop = field(default_factory=lambda: Loop(Comm(0, 1)))
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What puts the user's objects back as they were."""
    servers: int = 0
    """How many processes of the job only serve, and are not counted among its ranks."""
    reach: list[Any] = field(default_factory=list)
    """Where they are, for each optimizer that is not attached yet."""
    busy: str = ""
    """Why the others may have to wait for long for this rank; empty: for no reason."""
    end_watch: Callable[[], None] = lambda: None
    """What stops the watch of this rank."""
    _pull: list[Pull] = field(default_factory=list)
    _parts: dict[int, tuple[Comm, Comm]] = field(default_factory=dict)

    def parts(self, replicas: int) -> tuple[Comm, Comm]:
        """The ranks that divide a replica with this one, and those with its place in others (all must come to it)."""
        if replicas not in self._parts:
            self._parts[replicas] = parts(self.comm, replicas)
        return self._parts[replicas]

    def pull(self) -> Pull:
        """Pieces on request, from the first use on (all ranks must come to it)."""
        if not self._pull:
            self._pull.append(Pull(self.comm))
            BEFORE_LEAVING.append(self._end_pull)
        return self._pull[0]

    def _end_pull(self) -> None:
        if dist.is_initialized():  # a script may have ended its group already
            self._pull[0].close()


BEFORE_LEAVING: list[Callable[[], None]] = []
"""What every rank does before it leaves the world in an orderly way."""

_here = World()


def here() -> World:
    """The run this process takes part in (one process until it has joined)."""
    return _here


def set_here(world: World) -> None:
    """Called once, by whoever joins."""
    global _here
    _here = world


def accelerator() -> str:
    """The kind of device models run on here: an accelerator where there is one."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
