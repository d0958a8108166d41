"""Joining the world that was started: one store, one process group, and words for whoever is missing or double.

On one host the ranks meet in a folder that only their user can enter (`folder`): the supervisor of `dtorch` makes it,
rank 0 under torchrun, mpirun and srun (`address`). Across hosts rank 0 hosts a store, or torchrun's own is used, with
the job's secret where it has one (`secret`). Every rank adds one to its key before the group is made, so a number given
twice is found at once, and a missing rank is named. A group that the script has made itself is used instead (`adopt`).
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.core.listeners import allow_many_files, sealed
from distributedtorch.launch import address as addresses
from distributedtorch.launch import adopt, ranks, record, secret
from distributedtorch.launch import folder as folders
from distributedtorch.launch import port as ports
from distributedtorch.launch.place import Place

_SECONDS_BETWEEN_LOOKS = 0.02


def join(place: Place, *, device_type: str, timeout_seconds: float = 1800) -> Store:
    """Make this process a member of its world, and give the store the members share.

    Args:
        place: Where this process stands; not alone.
        device_type: Where the model lives, "cpu" or "cuda".
        timeout_seconds: How long to wait for the other ranks, and for any one exchange later.

    Raises:
        LaunchError: The script's own group does not fit, a rank is missing, or two processes have one number.
    """
    assert place.launcher != "none", "one process joins nothing"
    record.install(place)
    allow_many_files()
    if place.launcher != "dtorch":
        os.environ.pop(folders.VARIABLE, None)  # of a job that this one was started from
        addresses.meet(place, timeout_seconds)
    adopted = dist.is_initialized()
    if adopted:
        adopt.adopt(place)
        _adopted.append(True)
    record.joined(place)
    if not adopted and not _folder():
        if place.launcher == "torchrun":
            _join_torchrun(place, timeout_seconds)
        elif place.launcher in ("mpirun", "srun"):
            listener = addresses.settle(place)
            _hosted.extend([] if listener is None else [ports.host(listener)])
    store = client(timeout_seconds, patience_seconds=60 if place.launcher == "dtorch" else timeout_seconds)
    if not adopted or _folder():
        _meet(place, store, timeout_seconds)
    if _folder():
        addresses.forget(place)
    if not adopted:
        _group(place, device_type, timeout_seconds)
    atexit.register(_leave)
    return store


def let_main_first(place: Place) -> None:
    """On ranks above 0, where that was asked for, return when rank 0 has come to meet the others.

    It meets them by this library, or by a process group that its script makes.
    """
    asked = os.environ.pop(ranks.AFTER_MAIN, "")  # not for the processes that this one starts
    if not asked or place.run_folder is None:
        return
    if place.rank == 0:
        adopt.before_make(partial(record.comes, place))
    while place.rank and not record.has_come(place.run_folder, 0):
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _group(place: Place, device_type: str, timeout_seconds: float, within: str = "") -> None:
    timeout = timedelta(seconds=timeout_seconds)
    store = PrefixStore(f"group/{within}", group_store(timeout))
    with sealed():
        dist.init_process_group(
            _backend(place, device_type), store=store, rank=place.rank, world_size=place.world, timeout=timeout
        )


def group_store(timeout: timedelta) -> Store:
    """Where the members of a process group find each other.

    On one host a store of torch's own: its groups' threads still look there while Python ends.
    """
    if folder := _folder():
        store: Store = FileStore(f"{folder}/{folders.GROUPS}", -1)
        store.set_timeout(timeout)
        return store
    store, known = _tcp(timeout.total_seconds(), 60), secret.given()
    return PrefixStore(secret.code(known, b"groups"), store) if known else store


def part(world: int, timeout_seconds: float = 1800) -> None:
    """Return when all processes have come here: from then on nobody needs anything of their group.

    Raises:
        LaunchError: The group is the script's own.
    """
    if _adopted:
        given = "torch.distributed is initialised by the script, under a plan whose last processes only serve"
        do = "remove init_process_group: dt.distribute makes its own group"
        raise LaunchError(explain(given, "a group of the workers alone", do))
    store = client(timeout_seconds)
    if store.add("parted", 1) == world:
        store.set("parted/all", "")
    store.get("parted/all")


def regroup(workers: Place | None, *, device_type: str, timeout_seconds: float = 1800) -> None:
    """End the group of all processes, after `part`; workers (those with a place among them) make one of their own."""
    dist.destroy_process_group()
    if workers is not None:
        _group(workers, device_type, timeout_seconds, WORKERS)


WORKERS = "workers"
"""What sets the keys apart that only workers use, where other processes serve."""


def client(timeout_seconds: float = 60, patience_seconds: float = 60, within: str = "") -> Store:
    """A connection of its own to the store `join` gave, for a second thread: one connection serves one caller."""
    if folder := _folder():
        return cast("Store", folders.Folder(Path(folder), within, timeout_seconds))
    if _adopted:
        return adopt.client()
    store, known = _tcp(timeout_seconds, patience_seconds), secret.given()
    store = PrefixStore(within, store) if within else store
    return cast("Store", secret.Keyed(store, known)) if known else store


def _folder() -> str | None:
    """Where the ranks meet, if they are on one host."""
    return os.environ.get(folders.VARIABLE)


def _tcp(timeout_seconds: float, patience_seconds: float) -> Store:
    """A connection to the store of several hosts."""
    address, port = _address()
    patience = timedelta(seconds=min(timeout_seconds, patience_seconds))
    try:
        store = TCPStore(address, port, is_master=False, timeout=patience)
    except RuntimeError as error:
        given = f"the store at {address}:{port} (MASTER_ADDR, MASTER_PORT) cannot be reached"
        do = "look at the output of rank 0; start again by dtorch run, torchrun, mpirun or srun"
        raise LaunchError(explain(given, "a running starter", do)) from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # each restart of torchrun's has keys of its own
    return PrefixStore(f"distributedtorch/{attempt}", store)


def _join_torchrun(place: Place, timeout_seconds: float) -> None:
    """Bring torchrun's store into being: one of its agents hosts it, or rank 0 does."""
    address, port = _address()
    if addresses.on_one_host(place) or _is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if place.rank == 0 and not _is_loopback(address):
        print(
            f"distributedtorch: torchrun's store listens beyond loopback ({address}:{port}) {secret.spoken()}, "
            "and gloo and NCCL send clear text: keep that network private",
            file=sys.stderr,
        )
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=timedelta(seconds=timeout_seconds)))
    except RuntimeError as error:
        given = f"rank {place.rank} of {place.world} did not find all others at {address}:{port}: {error}"
        raise LaunchError(explain(given, "every rank to start", "look at the output of the failed ranks")) from error
    _hosted.append(store)


_adopted: list[bool] = []
"""Not empty: the group is the script's own."""

_hosted: list[Store] = []
"""Kept alive for the life of the process: where rank 0 hosts the store, this object is the host."""


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def _backend(place: Place, device_type: str) -> str:
    if device_type == "cuda" and torch.cuda.device_count() >= place.local_world:
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _meet(place: Place, store: Store, timeout_seconds: float) -> None:
    """Return when every rank is there, once each."""
    record.reached()
    keys = [f"joined/{rank}" for rank in range(place.world)]
    mine = keys[place.rank]
    store.add(mine, 1)
    deadline = time.monotonic() + timeout_seconds
    while True:
        complete = store.check(keys)
        if store.add(mine, 0) > 1:
            given = f"two processes have joined as rank {place.rank} of {place.world}"
            do = "start every process once, by dtorch run or torchrun, and give each its own RANK"
            raise LaunchError(explain(given, "one process per rank", do))
        if complete:
            return
        if time.monotonic() > deadline:
            raise LaunchError(_missing(store, keys, timeout_seconds))
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _missing(store: Store, keys: Sequence[str], timeout_seconds: float) -> str:
    there = [rank for rank, key in enumerate(keys) if store.check([key])]
    missing = [rank for rank in range(len(keys)) if rank not in there]
    return explain(
        f"after {timeout_seconds:g} s rank {_list(there)} of {len(keys)} had joined; missing: rank {_list(missing)}",
        "every rank to call dt.distribute",
        "look at the logs of the missing ranks; raise the timeout if they download or load for longer",
    )


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _leave() -> None:
    """Close the group quietly after a good end. After an error the connections drop with the process: peers notice."""
    if dist.is_initialized() and not record.failed():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
