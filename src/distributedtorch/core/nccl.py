"""Exchanges of CUDA tensors by NCCL's collectives, on its stream; errors name the job's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from distributedtorch.core.pairs import Works

# torch 2.13 has other names for the same calls.
_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Among = tuple["dist.ProcessGroup | None", Sequence[int], int]
"""A group (None: all), the ranks of the job in it, and this one's place among them."""


def is_there() -> bool:
    """Whether exchanges of CUDA tensors go through NCCL."""
    return "nccl" in dist.get_backend_config().lower() if hasattr(dist, "get_backend_config") else False


def begin(among: Among, flat: Tensor, bounds: Sequence[int], *, reduce: bool, gather: bool) -> Works:
    """Sum and gather pieces: whole-buffer calls where these are equal, one per owner where not."""
    group, members, place = among
    whole, mine, own = flat[bounds[0] : bounds[-1]], flat[bounds[place] : bounds[place + 1]], members[place]
    if reduce and gather:
        return [(dist.all_reduce(whole, group=group, async_op=True), own)]
    if len({high - low for low, high in pairwise(bounds)}) == 1:
        if reduce:
            return [(_scatter(mine, whole, group=group, async_op=True), own)]
        return [(_gather(whole, mine, group=group, async_op=True), own)]
    spans = zip(members, pairwise(bounds), strict=True)
    pieces = [(rank, flat[low:high]) for rank, (low, high) in spans if high > low]
    if reduce:
        return [(dist.reduce(piece, rank, group=group, async_op=True), rank) for rank, piece in pieces]
    return [(dist.broadcast(piece, rank, group=group, async_op=True), rank) for rank, piece in pieces]


def exchange(group: dist.ProcessGroup | None, mine: Tensor, world: int) -> Callable[[], Tensor]:
    """Every rank's `mine`, stacked, for whatever comes later on the stream on which the result is called."""
    out = mine.new_empty((world, *mine.shape))
    work = _gather(out.view(-1), mine.detach().reshape(-1), group=group, async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return out

    return finish
