"""What a pickle of another library may name, and what we make of it: nothing here looks up or calls what a file names.

Containers become plain ones, torch's types themselves, objects of some classes of torch and DeepSpeed inert records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Name:
    """Something a pickle names, not looked up."""

    text: str


@dataclass(eq=False)
class Record:
    """An object of a known class: what it was made of."""

    kind: str
    args: tuple[Any, ...] = ()
    fields: Any = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """A field; None where it has none of that name."""
        return self.fields.get(name) if isinstance(self.fields, dict) else None


Maker = Callable[..., Any]


_MOST_TEXT, _MOST_ITEMS, _MOST_BITS = 1 << 16, 64, 64


def key(value: Any) -> Any:
    """A dict's key: hashing must be cheap whatever the file holds, and different for different ones."""
    if type(value) is tuple and len(value) <= _MOST_ITEMS and all(map(_is_plain, value)):
        return value
    if value is None or type(value) in (bytes, Name, Record, torch.dtype) or _is_plain(value):
        return value
    raise ValueError(f"a {type(value).__name__} as a key")


def _is_plain(item: Any) -> bool:
    """Whether it is a number or a text, of a length that names have."""
    if type(item) is int:
        return item.bit_length() <= _MOST_BITS
    return len(item) <= _MOST_TEXT if type(item) is str else type(item) in (float, bool)


def pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return {key(one): value for one, value in zip(items[::2], items[1::2], strict=True)}


def _ordered(*args: Any) -> dict[Any, Any]:
    return {} if not args else pairs([item for pair in args[0] for item in (pair[0], pair[1])])


def _counter(*args: Any) -> Counter[Any]:
    if args and (type(args[0]) is not dict or any(type(value) is not int for value in args[0].values())):
        raise ValueError("a Counter of what is not numbers")
    return Counter(args[0] if args else {})


def _size(*args: Any) -> tuple[int, ...]:
    if len(args) != 1 or type(args[0]) not in (tuple, list) or any(type(n) is not int for n in args[0]):
        raise ValueError("a size that is not numbers")
    return tuple(args[0])


def _set(*args: Any) -> set[Any]:
    if args and type(args[0]) not in (list, tuple):
        raise ValueError("a set of what is not a list")
    return set(map(key, args[0])) if args else set()


def _encode(text: str, coding: str = "latin1") -> bytes:
    if type(text) is not str or coding != "latin1":
        raise ValueError("an encoding")
    return text.encode("latin1")


def _scalar(dtype: Record, data: bytes) -> int | float | bool:
    kind = dtype.args[0] if type(dtype) is Record and dtype.args else None
    if kind not in _NUMPY or type(data) is not bytes or len(data) != np.dtype(kind).itemsize:
        raise ValueError("a numpy number")
    number: int | float | bool = np.frombuffer(data, kind)[0].item()
    return number


_NUMPY = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}
MAKERS: dict[str, Maker] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": _counter,
    "torch.Size": _size,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "_codecs.encode": _encode,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
_DCP = "torch.distributed.checkpoint"
RECORDS = {
    "torch.device",
    "numpy.dtype",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "torch.serialization._get_layout",
    f"{_DCP}.metadata.Metadata",
    f"{_DCP}.metadata.MetadataIndex",
    f"{_DCP}.metadata.ChunkStorageMetadata",
    f"{_DCP}.metadata.TensorStorageMetadata",
    f"{_DCP}.metadata.BytesStorageMetadata",
    f"{_DCP}.metadata.TensorProperties",
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem._StorageInfo",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes whose objects become records."""
DTYPES = {name for name, value in vars(torch).items() if type(value) is torch.dtype}
STORAGES: dict[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
"""Names of a tensor's memory, with its type."""
_TYPES = {f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("dict", "list", "int")}
NAMES = RECORDS | STORAGES.keys() | _TYPES | {"torch.Tensor", "torch.nn.parameter.Parameter"}
"""All that may be named beside what is made here."""
