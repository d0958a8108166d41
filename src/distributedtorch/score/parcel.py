"""What the ranks of an evaluation send each other: a card (JSON) and tensors of any shape, as raw bytes.

Each rank sends its own part to every other, once per evaluation: B(N-1) bytes for a part of B bytes. Nothing is
pickled: dtypes and shapes travel in the card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm


class Parcel(NamedTuple):
    """One rank's part."""

    card: dict[str, Any]
    """Plain data, ready for JSON."""
    tensors: list[Tensor]


def gather(comm: Comm, name: str, mine: Parcel) -> list[Parcel]:
    """Every rank's parcel, in rank order; tensors that travelled are on the host."""
    if comm.world == 1:
        return [mine]
    header = {"card": mine.card, "tensors": [[str(t.dtype).split(".")[1], list(t.shape)] for t in mine.tensors]}
    headers = [json.loads(text) for text in comm.bytes_of_all(name, json.dumps(header).encode())]
    forms = [[(getattr(torch, dtype), shape) for dtype, shape in header["tensors"]] for header in headers]
    bounds = [0, *accumulate(sum(_size(*form) for form in rank) for rank in forms)]
    flat = torch.empty(bounds[-1], dtype=torch.uint8)
    if mine.tensors:
        torch.cat([_raw(t) for t in mine.tensors], out=flat[bounds[comm.rank] : bounds[comm.rank + 1]])
    if len(flat):
        comm.all_gather(f"{name}/tensors", flat, bounds).wait()
    pieces = [flat[a:b] for a, b in pairwise(bounds)]
    return [Parcel(h["card"], _unpack(f, p)) for h, f, p in zip(headers, forms, pieces, strict=True)]


def split(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """What `join` put together, taken apart again: for each of the joined parcels, those of all ranks."""
    apart = []
    for parcel in parcels:
        bounds = [0, *accumulate(parcel.card["counts"])]
        cut = [parcel.tensors[a:b] for a, b in pairwise(bounds)]
        apart.append([Parcel(card, tensors) for card, tensors in zip(parcel.card["cards"], cut, strict=True)])
    return [list(ranks) for ranks in zip(*apart, strict=True)]


def join(parcels: Sequence[Parcel], **extra: Any) -> Parcel:
    """Several parcels as one, to be sent together; `extra` goes on its card."""
    card = {"cards": [p.card for p in parcels], "counts": [len(p.tensors) for p in parcels], **extra}
    return Parcel(card, [tensor for p in parcels for tensor in p.tensors])


def in_order(parts: Sequence[Sequence[tuple[int, Any]]]) -> list[Any]:
    """Things that ranks have by global batch, as one process would have come to them.

    A rank's rows are one piece of each global batch, in rank order.
    """
    known = [(batch, rank, thing) for rank, mine in enumerate(parts) for batch, thing in mine]
    return [thing for _, _, thing in sorted(known, key=lambda row: row[:2])]


def _raw(tensor: Tensor) -> Tensor:
    # A clone, since `contiguous` leaves the odd strides of a single element, which cannot be seen as bytes.
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _size(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize


def _unpack(forms: Sequence[tuple[torch.dtype, list[int]]], raw: Tensor) -> list[Tensor]:
    bounds = [0, *accumulate(_size(*form) for form in forms)]
    # A copy of its own for each: a view as another dtype needs an aligned start.
    return [
        raw[a:b].clone().view(dtype).view(shape)
        for (dtype, shape), a, b in zip(forms, bounds, bounds[1:], strict=False)
    ]
