"""What a script may ask or say about the run: numbers, sums over ranks, the weight of a loss."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.world import accelerator, here
from distributedtorch.launch.start import join_world
from distributedtorch.run import RUN
from distributedtorch.sync.loose import Loose

Number = TypeVar("Number", int, float, Tensor)


def rank() -> int:
    """This process's number, from 0."""
    return here().rank


def world() -> int:
    """How many processes take part."""
    return here().size


def is_main() -> bool:
    """Whether this is rank 0."""
    return here().rank == 0


def device() -> torch.device:
    """The device this rank computes on."""
    kind = accelerator()
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, here().local_rank % torch.accelerator.device_count())
    )


def print(*values: Any, **kwargs: Any) -> None:
    """`print` on rank 0 only."""
    if is_main():
        builtins.print(*values, **kwargs)


def barrier() -> None:
    """Return when every rank has come here."""
    join_world()
    here().comm.barrier()


def sync() -> None:
    """Make replicas the same that step alone (`local`, `diloco`, `gossip`, `server`). Nothing to do under others.

    All ranks call it after the same optimizer step: before an evaluation, or before a model is taken out of the run.
    """
    for member in here().loop.members:
        member.sync.settle()


def total(x: Number) -> Number:
    """The sum of `x` over ranks."""
    return _over_ranks(x, 1.0, 1.0, "total")


def mean(x: Number) -> Number:
    """The mean of `x` over the global batch: ranks count by the rows they had in the present batch."""
    rows = here().loop.rows
    if rows is None:
        return _over_ranks(x, 1.0, float(here().size), "mean")
    return _over_ranks(x, rows.mine, rows.everywhere, "mean")


def _over_ranks(x: Number, factor: float, divisor: float, name: str) -> Number:
    comm = here().comm
    if comm.world == 1:
        return x
    value = x.detach().double() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)
    value = value * factor if factor else torch.zeros_like(value)
    values = comm.exchange(name, value)
    if name == "total" and RUN.feed is not None:
        RUN.feed.added(values)
    result = values.sum(dim=0) / divisor
    if isinstance(x, Tensor):
        return result.to(x.dtype)
    return type(x)(result.item())


def weight(loss: Tensor, n: float | Tensor) -> Tensor:
    """Say that `loss` is a mean over `n` units (tokens) on this rank, so that the global mean is exact."""
    loop, comm = here().loop, here().comm
    units = 0.0 if loop.idle and float(n) >= 0 else float(n)  # a rank without rows has a repeated one
    if units < 0 or loss.numel() != 1:
        given = f"dt.weight of a loss of shape {tuple(loss.shape)} with n={units:g}"
        raise UsageError(explain(given, "one number and n >= 0", "take the mean first; pass the number of units"))
    everywhere = (
        float(comm.exchange("weight", torch.tensor(units, dtype=torch.float64)).sum()) if comm.world > 1 else units
    )
    if everywhere == 0:
        raise UsageError(
            explain("dt.weight with n=0 on every rank", "some unit on some rank", "skip the batch on all ranks")
        )
    batch, last = (loop.rows.batch, loop.rows.last) if loop.rows else (-1, False)
    loop.explicit = Rows(mine=units, everywhere=everywhere, batch=batch, last=last)
    if comm.world == 1:
        return loss
    return loss * (units * comm.world / everywhere) if units else loss.nan_to_num(0.0) * 0.0


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What this rank holds and has sent so far."""

    steps: int
    """Optimizer steps taken."""
    bytes_held: dict[str, int]
    """Parameters, gradients and optimizer state kept between steps."""
    bytes_sent: dict[str, int]
    """Payload sent by this rank, by kind of exchange."""
    seconds_waiting: dict[str, float]
    """Time the training thread was held, by kind of exchange."""
    exchanges: dict[str, int]
    """Exchanges begun, by kind."""
    drift: float | None = None
    """How far replicas that step alone were apart in the last round, relative to the size of the parameters."""
    backlog: int | None = None
    """What is not applied yet: pushes that wait at the parameter server beside this rank, or, under `delay`, the
    gradient or the round of each optimizer that is on its way."""
    shares: tuple[float, ...]
    """Under `balance`, the part of a batch that each rank takes by the latest measurement; empty without."""


def stats() -> Stats:
    """Bytes held and sent, and time waited, on this rank since the start."""
    held: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for member in here().loop.members:
        for kind, size in member.sync.bytes_held().items():
            held[kind] = held.get(kind, 0) + size
    loose = [member.sync for member in here().loop.members if isinstance(member.sync, Loose)]
    drifts = [sync.drift for sync in loose if sync.drift is not None]
    backlogs = [member.sync.backlog for member in here().loop.members]
    waiting = [count for count in backlogs if count is not None]
    traffic = {kind: t for kind, t in here().comm.traffic.items() if t.count}
    return Stats(
        steps=here().loop.steps,
        bytes_held=held,
        bytes_sent={kind: t.bytes_sent for kind, t in traffic.items()},
        seconds_waiting={kind: t.seconds for kind, t in traffic.items()},
        exchanges={kind: t.count for kind, t in traffic.items()},
        drift=max(drifts, default=None),
        backlog=sum(waiting) if waiting else None,
        shares=() if RUN.balance is None else RUN.balance.shares,
    )


@contextmanager
def main_first() -> Iterator[None]:
    """Rank 0 runs the block first, then the others: for downloads and caches."""
    join_world()
    if not is_main():
        here().comm.barrier("main first")
    yield
    if is_main():
        here().comm.barrier("main first")
