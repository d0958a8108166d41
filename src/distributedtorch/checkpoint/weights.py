"""A model's weights in plain safetensors: one file, or the shards and index that Hugging Face reads.

Tensors pass one at a time. Tied weights are written once, under their first name. Everything is written under another
name first and then renamed, the index last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint import blocks
from distributedtorch.core.errors import CheckpointError, explain

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Tensor]
    """Reads it."""

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


def of_tensors(state: Mapping[str, Any]) -> tuple[list[Weight], dict[str, str]]:
    """The tensors of a model's state, and of tied ones the further names with the first."""
    found: dict[tuple[Any, ...], str] = {}
    made, tied = [], {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        same = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and found.setdefault(same, name) != name:
            tied[name] = found[same]
        else:
            made.append(
                Weight(name=name, shape=tuple(value.shape), dtype=value.dtype, values=lambda value=value: value)  # type: ignore[misc]
            )
    return made, tied


def size_of(text: str) -> int:
    """The bytes that "5GB" means; also MB, KB, GiB, MiB, KiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?I?B?)", text.strip().upper())
    if found is None or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise CheckpointError(explain(f"--max-shard {text}", "a size", "give it as 5GB, 500MB or 2GiB"))
    return int(float(found[1]) * _UNITS[found[2]])


def write_file(path: Path, weights: Sequence[Weight], tied: Mapping[str, str]) -> None:
    """One file of all weights."""
    refuse_there(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft-{uuid.uuid4().hex}")
    try:
        _write(draft, weights, tied)
        refuse_there(path)
        os.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_folder(folder: Path, weights: Sequence[Weight], tied: Mapping[str, str], max_shard: int) -> list[str]:
    """Shards of at most so many bytes, with their index; the names of the files. config.json may be there already."""
    shards = _shards(weights, max_shard)
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    if folder.exists() and not folder.is_dir():
        refuse_there(folder)
    for there in [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]:
        refuse_there(there)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".draft-{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            mine = {weight.name for weight in shard}
            _write(draft / name, shard, {one: first for one, first in tied.items() if first in mine})
        if len(shards) > 1:
            names.append(INDEX)
            _flushed(draft / INDEX, _index(names, shards))
        for name in names:
            refuse_there(folder / name)
            os.rename(draft / name, folder / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return names


def refuse_there(path: Path) -> None:
    """Refuse to overwrite."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(explain(f"{path} is there already", "a new file", "give another TARGET, or remove it"))


def _shards(weights: Sequence[Weight], max_shard: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    room = max_shard
    for weight in weights:
        if weight.bytes > room and shards[-1]:
            shards.append([])
            room = max_shard
        shards[-1].append(weight)
        room -= weight.bytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[Weight]]) -> bytes:
    total = sum(weight.bytes for shard in shards for weight in shard)
    where = {weight.name: name for name, shard in zip(names, shards, strict=False) for weight in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n"


def _write(path: Path, weights: Sequence[Weight], tied: Mapping[str, str]) -> None:
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)  # each begins at a multiple of its size
    header: dict[str, Any] = {"__metadata__": {**tied, "format": "pt"}}
    at = 0
    for weight in ordered:
        word = blocks.word(weight.dtype, weight.name)
        header[weight.name] = {"dtype": word, "shape": list(weight.shape), "data_offsets": [at, at + weight.bytes]}
        at += weight.bytes
    free = shutil.disk_usage(path.parent).free
    if at > free:
        given = f"{path.parent} has {free:,} bytes free, {at:,} are to be written"
        raise CheckpointError(explain(given, "space", "make room, or give another TARGET"))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in ordered:
            if weight.bytes:
                file.write(blocks.bytes_of(weight.values()))
        file.flush()
        os.fsync(file.fileno())


def _flushed(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
