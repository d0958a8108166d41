"""Folders of `torch.distributed.checkpoint`: what fully_shard, DDP and others save together, read by one process.

`.metadata` says which pieces of which tensor lie where; a piece is a file of torch.save inside a `.distcp` file. A
tensor in one piece stays in its file until it is used; others are put together in memory.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint import archive, foreign
from distributedtorch.checkpoint.foreign import Room, wrong
from distributedtorch.checkpoint.names import Record
from distributedtorch.core.errors import CheckpointError, explain

METADATA = ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_DEPTH, _LEVEL = 60, 300
"""Levels of the nested state, and the bytes that one takes, about."""
_KIND = "torch.distributed.checkpoint.metadata."
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)


def load(folder: Path, room: Room | None = None) -> dict[str, Any]:
    """The nested state that was saved."""
    what, room = str(folder / METADATA), room or Room()
    metadata = archive.mapped(folder / METADATA, room)
    if len(metadata) > foreign.MOST_BYTES:
        raise wrong(f"{what} has {len(metadata):,} bytes")
    said = foreign.read(bytes(metadata), what, room=room)
    try:
        if type(said) is not Record or said.kind != f"{_KIND}Metadata":
            raise ValueError("it is no Metadata")
        pieces = _Pieces(folder, said.get("storage_data"), room)
        paths = said.get("planner_data") or {}
        whole = _Node()
        for name, one in said.get("state_dict_metadata").items():
            path = paths.get(name, (name,))
            if type(path) is not tuple or not 0 < len(path) <= _MOST_DEPTH:
                raise ValueError(f"the path of {name}")
            if any(type(step) not in (str, int) for step in path):
                raise ValueError(f"the path of {name}")
            room.hold(_LEVEL * len(path))
            _put(whole, path, pieces.value(name, one))
        found: dict[str, Any] = _with_lists(whole)
        return found
    except CheckpointError:
        raise
    except _WRONG as error:
        raise wrong(f"{what} does not fit its files ({type(error).__name__}: {str(error)[:200]})") from None


class _Pieces:
    """The pieces of all tensors."""

    def __init__(self, folder: Path, storage: Mapping[Record, Record], room: Room) -> None:
        self.folder, self.room = folder, room
        self.files: dict[str, memoryview] = {}
        self.taken: dict[str, list[tuple[int, int]]] = {}
        """By file the ranges that were read, in order."""
        self.where: dict[tuple[str, tuple[int, ...]], Record] = {}
        for place, info in storage.items():
            self.where[place.get("fqn"), _numbers(place.get("offset") or ())] = info

    def value(self, name: str, said: Record) -> Any:
        if said.kind == f"{_KIND}BytesStorageMetadata":
            return archive.load_bytes(self._bytes(self.where[name, ()]), f"{self.folder}: {name}", self.room)
        if said.kind != f"{_KIND}TensorStorageMetadata":
            raise ValueError(f"{name} is a {said.kind}")
        properties = said.get("properties").fields
        dtype = properties[0] if type(properties) is tuple else properties["dtype"]
        return self._tensor(name, said.get("size"), dtype, said.get("chunks"))

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[Record]) -> Tensor:
        if type(dtype) is not torch.dtype or not archive.is_shape(shape):
            raise ValueError(f"shape of {name}")
        found = {_numbers(one.get("offsets")): _numbers(one.get("sizes")) for one in chunks}
        data = {offsets: self._bytes(self.where[name, offsets]) for offsets in found}
        if any(math.prod(sizes) * dtype.itemsize > len(data[offsets]) for offsets, sizes in found.items()):
            raise ValueError(f"a piece of {name} of more bytes than it has")
        if math.prod(shape) * dtype.itemsize > sum(map(len, data.values())):
            raise ValueError(f"{name} of shape {shape} in {sum(map(len, data.values()))} bytes")
        if len(found) == 1 and next(iter(found.values())) == tuple(shape):
            return self._piece(name, tuple(shape), dtype, next(iter(data.values())))
        self.room.hold_tensors(math.prod(shape) * (dtype.itemsize + 1))
        whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes in found.items():
            ends = [low + size for low, size in zip(offsets, sizes, strict=True)]
            if len(ends) != len(shape) or any(
                not 0 <= a <= b <= n for a, b, n in zip(offsets, ends, shape, strict=True)
            ):
                raise ValueError(f"a piece of {name} lies outside of it")
            span = tuple(slice(low, end) for low, end in zip(offsets, ends, strict=True))
            whole[span] = self._piece(name, sizes, dtype, data[offsets])
            filled[span] = True
        if not bool(filled.all()):
            raise ValueError(f"the pieces of {name} leave gaps")
        return whole

    def _piece(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype, data: memoryview) -> Tensor:
        piece = archive.load_bytes(data, f"{self.folder}: {name}", self.room)
        if not isinstance(piece, Tensor) or tuple(piece.shape) != sizes or piece.dtype != dtype:
            raise ValueError(f"a piece of {name} is not what {METADATA} says")
        return piece

    def _bytes(self, info: Record) -> memoryview:
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            given = f"{self.folder}: {file} is compressed ({info.get('transform_descriptors')})"
            raise CheckpointError(explain(given, "pieces as torch.save writes them", "save again without extensions"))
        if type(file) is not str or not _FILE.fullmatch(file):
            raise ValueError(f"file name {str(file)[:100]!r}")
        if file not in self.files:
            self.files[file] = archive.mapped(self.folder / file, self.room)
        if min(offset, length) < 0 or offset + length > len(self.files[file]):
            raise wrong(f"{self.folder / file} ends before what {METADATA} says is in it")
        self._take(file, offset, offset + length)
        return self.files[file][offset : offset + length]

    def _take(self, file: str, start: int, stop: int) -> None:
        """Each byte is a part of one piece: together they are no more than the files hold."""
        taken = self.taken.setdefault(file, [])
        place = bisect(taken, (start, stop))
        if (place and taken[place - 1][1] > start) or (place < len(taken) and taken[place][0] < stop):
            raise ValueError(f"{file}: bytes {start} to {stop} are said to be of two pieces")
        taken.insert(place, (start, stop))


def _numbers(found: Any) -> tuple[int, ...]:
    """Offsets or sizes of a piece."""
    if not archive.is_shape(tuple(found)):
        raise ValueError("a piece of a place that none has")
    return tuple(found)


class _Node(dict[Any, Any]):
    """A level of the nested state, as opposed to a dict that was saved as a value."""


def _put(whole: _Node, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        whole = whole.setdefault(step, _Node())
        if type(whole) is not _Node:
            raise ValueError("a value with others inside")
    whole[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Levels of 0, 1, 2, ... as the lists they were: paths through dicts have text, those through lists numbers."""
    if type(value) is not _Node:
        return value
    inside = {key: _with_lists(one) for key, one in value.items()}
    if inside and all(type(key) is int for key in inside):
        return [inside[number] for number in sorted(inside)]
    return inside
