"""Checkpoints without a run: written by one process, each all of one value, so that a mixture would show."""

from __future__ import annotations

from pathlib import Path

import torch

from distributedtorch import CheckpointError
from distributedtorch.checkpoint import index, place
from distributedtorch.checkpoint.channel import Channel
from distributedtorch.checkpoint.index import Reader
from distributedtorch.checkpoint.writing import Content, Piece, carry_out


def piece(key: str, file: str, value: float, size: int) -> Piece:
    tensor = torch.full((size,), value)
    return Piece(key=key, file=file, shape=(size,), stride=None, low=0, high=size, tensor=tensor)


def write(root: Path | str, value: float, size: int = 40, keep: int = 2) -> str:
    """Write a checkpoint; its name."""
    pieces = [piece("model.0/a", "model", value, size), piece("optimizer.0/a", "state", value, size)]
    run = {"value": value, "a": {"$tensor": "model.0/a"}}
    content = Content(pieces=pieces, run=run, head={"step": int(abs(value)), "plan": "ddp", "world": 1, "versions": {}})
    return carry_out(place.of(root), content, Channel(0, [0], None, ""), keep=keep, private=True)


def value_in(root: Path | str, name: str) -> float:
    """The one value all of a checkpoint was written with."""
    there = place.of(root)
    found = index.read(there, name)
    reader = Reader(there, name, found)
    reader.check(0, 1)
    value = float(found.content["run"]["value"])
    assert len(found.tensors) == 2
    assert all(bool((reader.whole(key) == value).all()) for key in found.tensors)
    return value


def newest(root: Path | str) -> float | None:
    """The value of the newest checkpoint that is whole."""
    for name in place.of(root).committed():
        try:
            return value_in(root, name)
        except CheckpointError:
            continue
    return None
