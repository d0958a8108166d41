"""Nested state as plain data: tensors by name, everything else as JSON, and back. No object is ever built by name.

JSON has no tuples, no keys but text, no infinities: `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`,
`{"$counter": ...}` (milestones of a scheduler), `{"$float": "inf"}` stand for them, `{"$tensor": name}` for a tensor.
Two places that share one tensor (tied weights) carry the same name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributedtorch.core.errors import CheckpointError, explain

_MANY, _BITS = 10_000, 64
_TENSOR = 2000
"""Bytes that the description of a tensor takes, about; beside its name, said several times."""


class Packer:
    """Collects the tensors of one state under names made of where they were met."""

    def __init__(
        self,
        what: str,
        prefix: str = "",
        known: Mapping[int, str] | None = None,
        spend: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`spend` is told of the bytes that a tensor takes beside its values, each time that one is met."""
        self.what, self.prefix, self.known, self.spend = what, prefix, known or {}, spend
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: dict[int, list[tuple[int, int]]] = {}

    def pack(self, value: Any, *path: object) -> Any:
        """The JSON for `value`; its tensors go into `tensors`."""
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, np.generic):
            return self.pack(value.item(), *path)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if id(value) in self.known:
            return {"$tensor": self.known[id(value)]}
        if isinstance(value, Tensor):
            name = self.prefix + ".".join(map(str, path))
            self.spend(_TENSOR + 8 * len(name))
            return {"$tensor": self._name(value.detach(), name)}
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path)
        if isinstance(value, list | tuple):
            items = [self.pack(item, *path, number) for number, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        given = f"{'.'.join(map(str, path))} in the state of {self.what} is a {type(value).__name__}"
        do = "leave it out of state_dict, or give its numbers"
        raise CheckpointError(explain(given, "tensors, numbers, text, lists and dicts", do))

    def _pack_mapping(self, value: Mapping[Any, Any], path: tuple[object, ...]) -> Any:
        if type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.pack(item, *path, key) for key, item in value.items()}
        pairs = [[self.pack(key, *path, key), self.pack(item, *path, key)] for key, item in value.items()]
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def _name(self, tensor: Tensor, name: str) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            given = f"{name} in the state of {self.what} is a sparse, quantized or meta tensor"
            raise CheckpointError(explain(given, "dense tensors with values", "convert it before dt.save"))
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or same not in self._names:
            while name in self.tensors:
                name += "~"
            self._names[same] = name
            self.tensors[name] = self._apart(tensor)
        return self._names[same]

    def _apart(self, tensor: Tensor) -> Tensor:
        """On the host and contiguous; copied where its memory overlaps another's, which the files cannot express."""
        host = tensor.to("cpu").contiguous()
        span = (host.data_ptr(), host.data_ptr() + host.nbytes)
        taken = self._storages.setdefault(host.untyped_storage().data_ptr(), [])
        if any(low < span[1] and span[0] < high for low, high in taken):
            return host.clone()
        taken.append(span)
        return host


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that was packed."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    inside: Any = value.get(kind)
    if kind == "$tensor":
        return tensors[inside]
    if kind == "$float":
        return float(inside)
    if kind == "$tuple":
        return tuple(unpack(inside, tensors))
    if kind in ("$dict", "$counter"):
        _refuse_slow(inside)
        pairs = {unpack(key, tensors): unpack(item, tensors) for key, item in inside}
        return pairs if kind == "$dict" else Counter(pairs)
    return {key: unpack(item, tensors) for key, item in value.items()}


def _refuse_slow(pairs: list[Any]) -> None:
    """Refuse many keys that could be made to have one hash: whole numbers of any size."""
    if len(pairs) > _MANY and any(type(key) is int and key.bit_length() > _BITS for key, _ in pairs):
        raise ValueError(f"{len(pairs):,} keys, among them numbers of more than {_BITS} bits")
