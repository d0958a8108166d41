"""Plain data in a file, for what a function gave in another process: JSON for the shape, safetensors for tensors.

Nothing is unpickled. Plain are None, booleans, numbers, text, tensors, and lists, tuples and dicts of these.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save


def write(path: Path, value: Any) -> None:
    """Put a value into a file for this user only; TypeError names the first part of it that is not plain."""
    tensors: dict[str, torch.Tensor] = {}
    shape = json.dumps(_encode(value, tensors))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(save(tensors, metadata={"value": shape}))


def read(path: Path) -> Any:
    """The value that `write` put there; tensors come back on the CPU."""
    with safe_open(path, framework="pt") as file:
        return _decode(json.loads(file.metadata()["value"]), file)


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


def _decode(node: list[Any], file: Any) -> Any:
    kind, content = node
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "dict":
        return {_decode(key, file): _decode(item, file) for key, item in content}
    if kind == "plain":
        return content
    items = [_decode(item, file) for item in content]
    return items if kind == "list" else tuple(items)
