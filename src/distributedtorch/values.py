"""What a script may ask or say about the run: numbers, sums over ranks, the weight of a loss."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import UsageError, explain, unread
from distributedtorch.core.loss import Kind, over_rows
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
    """`print` on rank 0 only. Where nobody reads it any more, the line is lost and not the run."""
    if is_main() and (stream := kwargs.get("file") or sys.stdout) is not None:
        with unread(stream):
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


def weight(loss: Tensor, n: float | Tensor, *, sum: bool = False) -> Tensor:
    """The loss, weighted so that the global mean (or sum) over units such as tokens is exact: call `backward` on it.

    Args:
        loss: A mean over `n` units on this rank, or the sum over them: one number.
        n: How many units this rank has; 0 counts for nothing, and so does a rank without rows, whatever it says.
        sum: The loss is a sum, and the training is on the sum over all ranks. Under `accumulate` sums of a window's
            batches are added up, as several `backward` before one `step` do in one process; means are over all
            units of the window.
    """
    loop, comm = here().loop, here().comm
    units = 0.0 if loop.idle and float(n) >= 0 else float(n)  # a rank without rows has a repeated one
    if units < 0 or loss.numel() != 1:
        given = f"dt.weight of a loss of shape {tuple(loss.shape)} with n={units:g}"
        raise UsageError(explain(given, "one number and n >= 0", "take the mean first; pass the number of units"))
    if comm.world > 1:
        _check_weighted(loss, summed=sum)
    everywhere = (
        float(comm.exchange("weight", torch.tensor(units, dtype=torch.float64)).sum()) if comm.world > 1 else units
    )
    if everywhere == 0:
        raise UsageError(
            explain("dt.weight with n=0 on every rank", "some unit on some rank", "skip the batch on all ranks")
        )
    if loss.requires_grad:
        rows = Rows(mine=units, everywhere=everywhere, summed=sum)
        at = loop.rows or rows
        loop.explicit = replace(rows, batch=at.batch, within=at.within, last=at.last)
    if comm.world == 1:
        return loss
    if not units:
        return loss.nan_to_num(0.0) * 0.0
    return loss * (comm.world if sum else units * comm.world / everywhere)


def _check_weighted(loss: Tensor, *, summed: bool) -> None:
    """Refuse a sum that is said to be a mean, and the reverse, where the graph shows it."""
    rows = here().loop.rows
    found = over_rows(loss, 0 if rows is None else round(rows.mine * rows.copies))
    if found is (Kind.MEAN if summed else Kind.SUM):
        call, needed = ("dt.weight(loss, n, sum=True)", "sum") if summed else ("dt.weight(loss, n)", "mean")
        do = "take reduction='sum', or leave sum=True out" if summed else "pass loss / n, or say sum=True"
        raise UsageError(explain(f"{call} of {found.value}", f"a {needed} over n units of this rank", do))


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
    """Rank 0 runs the block first, then the others: for downloads and caches.

    With several hosts, the first rank of each of them goes before its others: hosts may have disks of their own.
    """
    world = join_world()
    turns = 1 if world.local_size == world.size else 2
    mine = 0 if is_main() else 1 if turns > 1 and world.local_rank == 0 else turns
    before, world.busy = world.busy, "dt.main_first"  # however long it takes, nobody has hung
    try:
        for _ in range(mine):
            world.comm.barrier("main first")
        yield
    finally:
        world.busy = before
    for _ in range(turns - mine):
        world.comm.barrier("main first")
