"""What the exchange through shared memory does where memory cannot be had, and what millions of exchanges leave behind.

Run by `python -m benchmarks.shared_faults --limits --soak 10000000`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from benchmarks.shared_faults import MIB, descriptors, ran, tiny, workplace
from distributedtorch.core.world import here


def held() -> tuple[int, int]:
    """Resident bytes and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), descriptors()


def exchanges(number: int) -> list[list[float]]:
    """In a rank: so many exchanges of 4 KiB. Result: every rank's bytes and descriptors before and after, seconds."""
    comm = here().comm
    assert comm.shared is not None, comm.unshared
    flat, mine = comm.pool.zeros(1024, torch.float32), torch.full((1024,), float(comm.rank))
    bounds = [1024 * k // comm.world for k in range(comm.world + 1)]
    before, began = held(), 0.0
    for turn in range((number + 1000) // 2):
        if turn == 500:
            before, began = held(), time.monotonic()
        comm.all_reduce("sum", flat, bounds).wait()
        rows = comm.exchange("rows", mine)
        if turn % 1000 == 0:
            assert not flat.any() and rows[:, 0].tolist() == list(range(comm.world))
            flat.fill_(1.0)
            comm.all_reduce("sum", flat, bounds).wait()
            assert (flat == comm.world).all()
            flat.zero_()
    own = torch.tensor([*before, *held(), time.monotonic() - began], dtype=torch.float64)
    gathered: list[list[float]] = comm.exchange("held", own).tolist()
    return gathered


def soak(number: int) -> dict[str, Any]:
    """Nothing may grow with the number of exchanges."""
    with workplace():
        rows = dt.launch(exchanges, number, workers=2)
    grown = [(after - before, more - few) for before, few, after, more, _ in rows]
    bad = sum(abs(size) > MIB or fds != 0 for size, fds in grown)
    each = 1e6 * rows[0][4] / number
    print(f"{number} exchanges of 4 KiB, 2 ranks: {each:.1f} us each; grown by (bytes, descriptors) {grown}: {bad} bad")
    return {"exchanges": number, "faults": bad, "us_each": round(each, 2), "grown": grown, "rows": rows}


def learn(data_workers: int) -> list[torch.Tensor]:
    """In a rank: a few steps; the weights they end with."""
    model, optimizer, loader = dt.distribute(*tiny(), rows(data_workers), plan="zero2")
    return steps(model, optimizer, loader)


def rows(data_workers: int) -> DataLoader[Any]:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=32, num_workers=data_workers)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[torch.Tensor]:
    for _ in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return list(model.state_dict().values())


@contextlib.contextmanager
def no_address_space() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2048 * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def no_memfd() -> Iterator[None]:
    """As where a sandbox refuses it, on rank 1 only: all must agree."""
    make = os.memfd_create

    def refuse(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if os.environ.get("RANK") == "1":
            raise PermissionError(1, "Operation not permitted")
        return make(name, flags)

    os.memfd_create = refuse
    try:
        yield
    finally:
        os.memfd_create = make


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    os.environ["DISTRIBUTEDTORCH_SHARED"] = "0"
    try:
        yield
    finally:
        del os.environ["DISTRIBUTEDTORCH_SHARED"]


LIMITS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], int, int, str]] = {
    "nothing": (contextlib.nullcontext, 2, 0, "shared memory on cpu"),
    "switched off": (switched_off, 2, 0, "no shared memory: switched off by DISTRIBUTEDTORCH_SHARED=0"),
    "address space too small": (no_address_space, 2, 0, "Cannot allocate memory"),
    "memfd refused on one rank": (no_memfd, 2, 0, "Operation not permitted"),
    "16 ranks": (contextlib.nullcontext, 16, 0, "shared memory on cpu"),
    "data workers": (contextlib.nullcontext, 2, 2, "shared memory on cpu"),
}
"""What is done to the ranks, how many there are and how many data workers each has, what the printed line must say."""


def limits() -> dict[str, Any]:
    """What cannot be had is done without, with the reason in the printed line, and the same weights to the bit."""
    table: dict[str, Any] = {}
    plain: list[torch.Tensor] = []
    for name, (within, world, data_workers, words) in LIMITS.items():
        with within(), ran(learn, data_workers, workers=world) as run:
            faults = run.raised()
            plain = plain or run.value
            same = run.error is None and all(torch.equal(a, b) for a, b in zip(plain, run.value, strict=True))
            faults += [] if same or world != 2 else ["other weights than with nothing in the way"]
            faults += run.faults
        said = next((line for line in run.noted.lines if " workers (" in line[1]), (0.0, run.noted.text()))[1]
        faults += [] if words in said else [f"it said {said!r}"]
        print(f"{name}: {faults or 'as it should be'} ({said})")
        table[name] = {"ranks": world, "said": said.partition(" · other ranks")[0], "faults": faults}
    return {"faults": sum(bool(row["faults"]) for row in table.values()), "rows": table}
