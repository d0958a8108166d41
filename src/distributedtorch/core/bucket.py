"""How parameters lie in flat memory, and who owns which piece of it.

A *slab* is one flat buffer that holds consecutive parameters (or one large one); a *bucket* is the part of a slab that
travels in one exchange; a *piece* is what one rank owns of a bucket. Views into a slab have the shape and strides of
their parameters, so a slab may live anywhere: private memory now, a segment shared by a host's ranks later.

Parameters are laid out in reverse order of registration, near the order in which backward finishes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 16


def bucket_bytes(total: int) -> int:
    """Bytes a bucket aims at: about four to a model, so that they overlap with backward, between 1 and 25 MiB.

    DISTRIBUTEDTORCH_BUCKET_BYTES overrides.
    """
    given = os.environ.get("DISTRIBUTEDTORCH_BUCKET_BYTES")
    return int(given) if given else min(max(total // 4, 1 << 20), 25 << 20)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one parameter lies."""

    index: int
    """Its number among the parameters laid out."""
    start: int
    """First element in its slab."""
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view into a slab's memory."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One exchange's part of a slab."""

    bounds: tuple[int, ...]
    """Elements in the slab: rank k sums bounds[k] to bounds[k + 1]; the bucket runs from the first to the last."""
    slots: tuple[int, ...]
    """Numbers of the parameters that have elements in it."""


@dataclass(frozen=True, kw_only=True)
class Slab:
    """One flat buffer's plan."""

    dtype: torch.dtype
    device: torch.device
    numel: int
    """Elements, padding included."""
    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]
    """Rank k owns elements bounds[k] to bounds[k + 1]: one range of the slab, so one piece of a parameter."""
    buckets: tuple[Bucket, ...]

    def piece(self, slot: Slot, rank: int) -> tuple[int, int]:
        """What `rank` owns of a parameter: elements from and to, counted from the parameter's first."""
        low = min(max(self.bounds[rank] - slot.start, 0), slot.numel)
        return low, min(max(self.bounds[rank + 1] - slot.start, low), slot.numel)

    def empty(self) -> Tensor:
        """Memory for it, zeroed (so that padding never holds rubbish)."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)


def lay_out(
    params: Sequence[Tensor],
    world: int,
    *,
    whole: bool,
    limit: int | None = None,
    blocks: Sequence[int] = (),
    kinds: Sequence[int] = (),
    cut: bool = True,
    owned: bool = True,
) -> list[Slab]:
    """Plan slabs for `params`, in the order given.

    Args:
        params: What to lay out.
        world: Over how many ranks it is divided.
        whole: A parameter is owned by one rank, never divided.
        limit: Bytes a bucket has at most.
        blocks: For each parameter the block it belongs to: a slab holds parameters of one block only.
        kinds: For each parameter its kind: those of one kind lie together, wherever they stand.
        cut: A parameter may have elements in several buckets.
        owned: A rank keeps its range of a slab between exchanges. Else every bucket is divided evenly by itself, so
            that links are used in all directions at once.
    """
    limit = limit or bucket_bytes(sum(map(_bytes, params)))
    owners = _balance(params, world) if whole else None
    alike: dict[tuple[torch.dtype, torch.device, int], list[int]] = {}
    for index, param in enumerate(params):
        alike.setdefault((param.dtype, param.device, kinds[index] if kinds else 0), []).append(index)
    runs = [run for indices in alike.values() for run in _runs(params, indices, limit, blocks or [0] * len(params))]
    return [_slab(params, run, owners, world, limit if cut else sys.maxsize, owned=owned) for run in runs]


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no memory, and so no values."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A view without the repetitions of an expanded tensor (or of `like`): what is written to it counts everywhere."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _runs(params: Sequence[Tensor], indices: list[int], limit: int, blocks: Sequence[int]) -> list[list[int]]:
    """Consecutive small parameters of a block up to `limit` bytes together; a larger one alone."""
    runs: list[list[int]] = [[]]
    held = 0
    for index in indices:
        size = _bytes(params[index])
        if runs[-1] and (held + size > limit or blocks[index] != blocks[runs[-1][-1]]):
            runs.append([])
            held = 0
        runs[-1].append(index)
        held += size
    return runs


def _slab(
    params: Sequence[Tensor], run: list[int], owners: list[int] | None, world: int, limit: int, *, owned: bool
) -> Slab:
    order = sorted(run, key=lambda index: owners[index]) if owners else run
    slots, at = [], 0
    for index in order:
        shape, stride = params[index].shape, _dense_stride(params[index])
        slots.append(Slot(index=index, start=at, numel=params[index].numel(), shape=shape, stride=stride))
        at += params[index].numel()
    unit = 1 if owners else _ALIGN * world
    numel = max(-(-at // unit) * unit, 1)
    bounds = _whole_bounds(slots, owners, world) if owners else _even(0, numel, world)
    first = params[run[0]]
    step = max(unit, limit // first.element_size() // unit * unit)
    spans = [(start, min(start + step, numel)) for start in range(0, numel, step)]
    return Slab(
        dtype=first.dtype,
        device=first.device,
        numel=numel,
        slots=tuple(slots),
        bounds=tuple(bounds),
        buckets=tuple(_bucket(slots, bounds if owned else _even(*span, world), *span) for span in spans),
    )


def _even(start: int, stop: int, world: int) -> list[int]:
    return [start + (stop - start) * k // world for k in range(world + 1)]


def _bucket(slots: list[Slot], bounds: list[int], start: int, stop: int) -> Bucket:
    inside = tuple(s.index for s in slots if s.start < stop and s.start + s.numel > start)
    return Bucket(bounds=tuple(min(max(bound, start), stop) for bound in bounds), slots=inside)


def _whole_bounds(slots: list[Slot], owners: list[int], world: int) -> list[int]:
    """Slots lie in owner order, so each rank's part of the slab is one range."""
    ends = [max([s.start + s.numel for s in slots if owners[s.index] <= rank], default=0) for rank in range(world)]
    return [0, *ends]


def _balance(params: Sequence[Tensor], world: int) -> list[int]:
    """Largest first, to the rank with the least."""
    loads, owners = [0] * world, [0] * len(params)
    for index in sorted(range(len(params)), key=lambda k: (-params[k].numel(), k)):
        owners[index] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += _bytes(params[index])
    return owners


def _bytes(param: Tensor) -> int:
    return param.numel() * param.element_size()


def _dense_stride(param: Tensor) -> tuple[int, ...]:
    """Strides as they are where they are dense (channels last, transposed), else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(param.shape, param.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return tuple(torch.empty(param.shape, device="meta").stride())
        expected *= size
    return tuple(param.stride())
