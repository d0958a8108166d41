"""A folder of tensors that is there whole or not at all: written aside, synced, renamed into place, checked by hash.

`NAME.safetensors` holds tensors by name, `run.json` everything else with the sha256 of every file. A kill at any
moment leaves the old folder or the new one: the old one is moved to `PATH.previous` only while the new one takes its
place, and reading falls back to it. Files are 0600, the folder 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from distributedtorch.core.errors import CheckpointError, explain

CARD = "run.json"
VERSION = 1


def write(path: Path, files: Mapping[str, Mapping[str, Tensor]], card: Mapping[str, Any]) -> None:
    """Write a folder at `path`, in place of one that may be there."""
    aside, previous = path.with_name(f"{path.name}.writing"), path.with_name(f"{path.name}.previous")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        if previous.exists() and not path.exists():
            previous.rename(path)  # a writer died between the two renames below
        aside.mkdir(mode=0o700, parents=True)
        hashes, aliases = {}, {}
        for name, tensors in files.items():
            kept, aliases[name] = _once(tensors)
            hashes[name] = _put(aside / f"{name}.safetensors", tensor_bytes(kept))
        text = json.dumps({"version": VERSION, "sha256": hashes, "same as": aliases, **card})
        _put(aside / CARD, text.encode())
        _sync(aside)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        aside.rename(path)
        _sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except (OSError, TypeError, ValueError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        needed = "a folder that can be written, and plain numbers and text beside tensors"
        do = "free the disk or choose another path"
        raise CheckpointError(explain(f"{path} was not saved: {error}", needed, do)) from error


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read a folder and check every file."""
    previous = path.with_name(f"{path.name}.previous")
    folder = previous if not path.exists() and previous.exists() else path
    if not (folder / CARD).is_file():
        given = f"{path} is not a checkpoint: no {CARD} in it" if folder.exists() else f"there is nothing at {path}"
        raise CheckpointError(explain(given, "a folder written by dt.save", "check the path"))
    try:
        card = json.loads((folder / CARD).read_bytes())
        if card["version"] > VERSION:
            do = "install the newer distributedtorch"
            raise CheckpointError(explain(f"{path} has version {card['version']}", f"version {VERSION} or older", do))
        files = {name: _get(folder / f"{name}.safetensors", digest) for name, digest in card["sha256"].items()}
        for name, aliases in card["same as"].items():
            files[name] |= {alias: files[name][kept] for alias, kept in aliases.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        given = f"{folder} cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(explain(given, "an undamaged checkpoint", "use an older one")) from error
    return files, card


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the host, tied ones once; and for each further name the one it is kept under."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            kept[name] = tensor.detach().cpu().contiguous()
    return kept, aliases


def _put(path: Path, data: bytes) -> str:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _get(path: Path, digest: str) -> dict[str, Tensor]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        do = "use an older checkpoint: this one was damaged on disk or on the way"
        raise CheckpointError(explain(f"{path} has changed since it was written", "the bytes that were saved", do))
    return read_tensors(data)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
