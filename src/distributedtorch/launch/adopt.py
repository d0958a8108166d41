"""A process group that the script made itself: used as it is where it is the whole world and has gloo for the CPU."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store, _world, default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from distributedtorch.core.errors import LaunchError, explain, tell
from distributedtorch.core.listeners import sealed
from distributedtorch.core.override import override
from distributedtorch.launch.place import Place

_REMOVE = "remove init_process_group: dt.distribute makes its own group"


def check(place: Place) -> None:
    """Refuse a group of the script's own that is not this process's world.

    Raises:
        LaunchError: Its size, this process's number in it or its back end does not fit, or there are two groups.
    """
    if not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (place.rank, place.world):
        given = (
            f"torch.distributed is initialised as rank {rank} of {size}, "
            f"but the starter ({place.launcher}) says rank {place.rank} of {place.world}"
        )
        do = f"start {size} processes by torchrun, dtorch run, mpirun or srun; or {_REMOVE}"
        raise LaunchError(explain(given, "one group of all processes", do))
    if size == 1:
        return
    if len(_world.pg_map) > 1:
        given = f"torch.distributed has {len(_world.pg_map)} process groups already"
        raise LaunchError(explain(given, "the one group of all processes", f"make new_group later, or {_REMOVE}"))
    if "cpu:gloo" not in (backends := dist.get_backend_config()):
        given = f"torch.distributed is initialised with {backends}"
        do = f'init_process_group("cpu:gloo,cuda:nccl"), or "gloo" on the CPU; or {_REMOVE}'
        raise LaunchError(explain(given, "gloo for CPU tensors", do))


def adopt(place: Place) -> None:
    """Take the script's own group for the world."""
    check(place)
    if place.rank == 0:
        backends = dist.get_backend_config()
        tell(f"distributedtorch: the script's own process group is used ({place.world} ranks, {backends})")


def client() -> Store:
    """A connection of its own to the store of the script's group."""
    return PrefixStore("distributedtorch", _get_default_store().clone())  # type: ignore[attr-defined]


def before_make(act: Callable[[], None]) -> None:
    """Have something done before the script makes a process group: it waits there for the other ranks."""
    make = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        act()
        make(*args, **kwargs)

    dist.init_process_group = init_process_group


def without_port(place: Place, store: Callable[[timedelta], Store]) -> None:
    """Have a group that the script makes of all ranks found through this store, and not at a port of torch's.

    That port listens on all interfaces, without a key. It still does where the script has taken
    `init_process_group` out of torch.distributed before it imports this library.
    """
    make, serial = dist.init_process_group, itertools.count(1)
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        mine = given.get("rank", -1) in (-1, place.rank) and given.get("world_size", -1) in (-1, place.world)
        if mine and given.get("store") is None and given.get("init_method") in (None, "env://"):
            found = PrefixStore(f"own/{next(serial)}", store(given.get("timeout") or default_pg_timeout))
            given |= {"init_method": None, "store": found, "rank": place.rank, "world_size": place.world}
        with sealed(also_nccl=given.get("device_id") is not None):
            make(*call.args, **call.kwargs)

    dist.init_process_group = init_process_group


def before_destroy(act: Callable[[], None]) -> None:
    """Have something done before the script ends its own group: the other ranks may still need this one."""
    destroy = dist.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD) and dist.is_initialized():
            act()
        destroy(group)

    dist.destroy_process_group = destroy_process_group


def unwrapped(thing: object, place: Place) -> object:
    """The model inside DistributedDataParallel, which is told to let go of its gradients; anything else as it is."""
    if not isinstance(thing, DistributedDataParallel):
        return thing
    model: nn.Module = thing.module
    switch_off(thing)
    if place.rank == 0:
        tell(
            f"distributedtorch: DistributedDataParallel is taken off {type(model).__name__}: go on with the model that "
            'dt.distribute returns (its names have no "module.")'
        )
    return model


def switch_off(wrapper: DistributedDataParallel) -> Callable[[], None]:
    """Let a wrapper exchange nothing: calls go straight to its model. Result: what gives it its own forward again."""
    if hasattr(wrapper, "reducer"):  # else it is being made, and has no hooks to arm
        wrapper._remove_autograd_hooks()
    return override(wrapper, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs))


def switch_off_around(models: Sequence[nn.Module]) -> None:
    """Do so with wrappers that a script has made around these models or parts of them: the loop may go on with them."""
    mine = {id(module) for model in models for module in model.modules()}
    for one in gc.get_objects():  # not isinstance: asking an object for its class may run code of its own
        if issubclass(type(one), DistributedDataParallel) and id(one.module) in mine:
            switch_off(one)
