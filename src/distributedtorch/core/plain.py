"""Plain data as bytes, for what another process is to have: JSON for the shape, safetensors for tensors.

Nothing is unpickled. Plain are None, booleans, numbers, text, tensors, and lists, tuples and dicts of these.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from distributedtorch.core.errors import DesyncError

_SHAPE = "value"
"""Where the shape is, among the numbers of tensors."""


def pack(value: Any) -> bytes:
    """A value as bytes; TypeError names the first part of it that is not plain."""
    tensors: dict[str, torch.Tensor] = {}
    shape = json.dumps(_encode(value, tensors)).encode()
    return save({**tensors, _SHAPE: torch.frombuffer(bytearray(shape), dtype=torch.uint8)})


def unpack(data: bytes) -> Any:
    """The value that `pack` was given; tensors come back on the CPU."""
    tensors = load(data)
    return _decode(json.loads(bytes(tensors[_SHAPE].tolist())), tensors)


def heard(data: bytes, most: int = 1 << 16) -> Any:
    """A short JSON text that another process has said, or that someone has put in its place.

    Raises:
        DesyncError: It is too long, or none.
    """
    if len(data) > most:
        raise DesyncError(
            f"{len(data)} bytes in the store where a rank says at most {most}: no rank of this job said that"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DesyncError(f"something else than JSON in the store, which no rank of this job said: {error}") from None


def write(path: Path, value: Any) -> None:
    """Put a value into a file for this user only; TypeError as from `pack`."""
    data = pack(value)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def read(path: Path) -> Any:
    """The value that `write` put there."""
    return unpack(path.read_bytes())


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The shape as [kind, content]; tensors are put aside under a number."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu").contiguous().clone()
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [_encode(item, tensors) for item in value]]
    raise TypeError(f"a {type(value).__name__}")


def _decode(node: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
    kind, content = node
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    if kind == "plain":
        return content
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
