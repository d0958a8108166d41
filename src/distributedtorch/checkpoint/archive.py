"""torch.save's files: a zip with one pickle and the bytes of every tensor, opened in place without loading them.

Tensors are views of the mapped file: read from the disk when they are used, and changed by nobody. Sizes, offsets and
the zip's own checksums are checked before a tensor is made.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.checkpoint import foreign
from distributedtorch.checkpoint.foreign import Room, wrong
from distributedtorch.checkpoint.names import STORAGES, Maker, Name
from distributedtorch.core.errors import CheckpointError, explain

_HEADER = 30
"""Bytes of an entry's own header, before its name."""
_MOST_REPEATED = 1 << 20
"""Elements of a tensor that says the same memory several times over (`expand`)."""
_MOST_DIMS, _MOST = 64, (1 << 63) - 1
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, KeyError, OverflowError, EOFError)
_PARAMETER = Name("torch.nn.parameter.Parameter")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def mapped(path: Path, room: Room) -> memoryview:
    """A file's bytes, not read yet."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a plain file")
            room.open(status.st_size)
            size = status.st_size
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    except OSError as error:
        given = f"{path} cannot be read: {error.strerror}"
        raise CheckpointError(explain(given, "a checkpoint's file", "check the path")) from None


def load(path: Path, room: Room | None = None) -> Any:
    """What torch.save wrote into a file."""
    room = room or Room()
    return load_bytes(mapped(path, room), str(path), room)


def load_bytes(data: memoryview, what: str, room: Room | None = None) -> Any:
    """What torch.save wrote, from its bytes; they are of a source that `room` is of."""
    if bytes(data[: len(_LEGACY)]) == _LEGACY:
        given = f"{what} has the format that torch.save wrote before torch 1.6"
        do = "load it with torch where you trust it, and torch.save it again"
        raise CheckpointError(explain(given, "the zip that torch.save writes now", do))
    return _Archive(data, what, room or Room()).load()


def is_shape(shape: Any) -> bool:
    """Whether a tensor can have this shape, empty or not."""
    if not isinstance(shape, tuple | list) or len(shape) > _MOST_DIMS:
        return False
    return all(type(n) is int and 0 <= n <= _MOST for n in shape) and math.prod(n for n in shape if n) <= _MOST


class _Archive:
    def __init__(self, data: memoryview, what: str, room: Room) -> None:
        self.data, self.what, self.room = data, what, room
        self.entries = self._entries()
        pickles = [name for name in self.entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise wrong(f"{what} is a zip without one data.pkl")
        self.root = pickles[0].removesuffix("data.pkl")
        self.memory: dict[str, Tensor] = {}

    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(_Window(self.data)) as archive:  # type: ignore[arg-type]
                entries = {entry.filename: entry for entry in archive.infolist()}
        except _BAD_ZIP as error:
            raise wrong(f"{self.what} is not a whole zip ({error})") from None
        if sum(entry.compress_size for entry in entries.values()) > len(self.data):
            raise wrong(f"{self.what} is a zip whose entries lie over each other")
        return entries

    def load(self) -> Any:
        order = f"{self.root}byteorder"
        if order in self.entries and bytes(self._bytes(order)) != b"little":
            given = f"{self.what} was written on a big-endian machine"
            raise CheckpointError(explain(given, "little-endian numbers", "load and save it again with torch"))
        makers: dict[str, Maker] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._typed,
            "torch._tensor._rebuild_from_type_v2": self._with_attributes,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        }
        pickled = self.entries[f"{self.root}data.pkl"]
        if pickled.file_size > foreign.MOST_BYTES:
            raise wrong(f"{self.what} has a pickle of {pickled.file_size:,} bytes")
        return foreign.read(bytes(self._bytes(pickled.filename)), self.what, makers, self._storage, self.room)

    def _bytes(self, name: str) -> memoryview:
        """An entry's bytes in the file; they lie there as they are."""
        entry = self.entries.get(name)
        if entry is None:
            raise wrong(f"{self.what} has no {name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise wrong(f"{self.what}: {name} is compressed or encrypted")
        head = self.data[entry.header_offset : entry.header_offset + _HEADER]
        if len(head) != _HEADER:
            raise wrong(f"{self.what} ends before {name}")
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = entry.header_offset + _HEADER + lengths
        found = self.data[start : start + entry.file_size]
        if len(found) != entry.file_size:
            raise wrong(f"{self.what} ends before {name} does")
        if entry.CRC and zlib.crc32(found) != entry.CRC:  # torch can be told to write none
            raise wrong(f"{self.what}: {name} has changed since it was written")
        return found

    def _storage(self, said: Any) -> tuple[str, torch.dtype]:
        """The memory that a pickle refers to: its key, and the type it is said to have."""
        kind, named, key, _, numel = said
        if kind != "storage" or type(named) is not Name or named.text not in STORAGES or type(key) is not str:
            raise ValueError("a storage that torch.save does not write")
        dtype = STORAGES[named.text]
        if key not in self.memory:
            found = self._bytes(f"{self.root}data/{key}")
            self.memory[key] = torch.frombuffer(found, dtype=torch.uint8) if len(found) else torch.empty(0).byte()
        size = self.memory[key].numel()
        if type(numel) is not int or numel * dtype.itemsize != size:
            raise ValueError(f"a storage of {numel} elements in {size} bytes")
        return key, dtype

    def _tensor(self, storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Tensor:
        return self._view(storage[0], storage[1], offset, shape, stride)

    def _typed(self, storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> Tensor:
        if type(rest[2]) is not torch.dtype:
            raise ValueError("a tensor without a type")
        return self._view(storage[0], rest[2], offset, shape, stride)

    def _with_attributes(self, maker: Any, kind: Any, args: tuple[Any, ...], _: Any) -> Tensor:
        """A plain tensor to which someone gave attributes, which are left out."""
        makers = {"torch._utils._rebuild_tensor_v2": self._tensor, "torch._utils._rebuild_tensor_v3": self._typed}
        if type(maker) is not Name or maker.text not in makers or kind not in (Name("torch.Tensor"), _PARAMETER):
            raise ValueError("a tensor of another class")
        return makers[maker.text](*args)

    def _view(self, key: str, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
        if not is_shape(shape) or not isinstance(stride, tuple | list) or len(shape) != len(stride):
            raise ValueError("a tensor of a shape that none has")
        if any(type(n) is not int or not 0 <= n <= _MOST for n in (offset, *stride)):
            raise ValueError("a tensor of strides that none has")
        memory = self.memory[key]
        have, numel = memory.numel() // dtype.itemsize, math.prod(shape)
        reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        if (numel and reach > have) or numel > max(have, _MOST_REPEATED):
            raise ValueError(f"a tensor of shape {tuple(shape)} in {memory.numel()} bytes")
        if not numel:
            return torch.empty(shape, dtype=dtype)
        if memory.data_ptr() % dtype.itemsize:
            memory = self.memory[key] = memory.clone()
        return memory[: have * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self.data, self.at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: len(self.data)}[whence]
        if start + offset < 0:
            raise OSError("before the beginning")
        self.at = start + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, out: Any) -> int:
        piece = self.data[self.at : self.at + len(out)]
        out[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)
