"""checkpoint.json: what a checkpoint holds, as plain data, and the check of everything a reader relies on.

    {"sha256": of the rest, "checkpoint": {
        "format": 1, "versions": ..., "plan": ..., "world": 4, "step": 3000,
        "run": nested state; {"$tensor": key} stands for a tensor,
        "tensors": {key: {"shape", "dtype", "stride" where not row-major, "parts": [[file, name, from, to], ...]}},
        "files": {name: {"bytes", "blocks": [sha256 of every 4 MiB]}}}}

A part is a range of a tensor's elements, counted in memory order: row-major, unless `stride` says otherwise. Keys that
a reader does not know are left alone; a change that it could not leave alone raises `format`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from distributedtorch.checkpoint import blocks
from distributedtorch.checkpoint.blocks import DTYPES, Blocks, Card, damaged
from distributedtorch.checkpoint.place import _FILE, INDEX, Place
from distributedtorch.core.errors import CheckpointError, explain

FORMAT = 1
MOST_BYTES = 1 << 30
"""Of a checkpoint.json."""
MOST_DIMS = 64
_MOST_DEPTH = 200
_MOST_OPEN = 64
_MOST = (1 << 63) - 1
_HEAD, _HEX = b'{"sha256": "', 64
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of a tensor, and where it lies."""

    file: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None
    """Where its elements are not counted in row-major order: its strides, dense."""
    parts: tuple[Part, ...]
    """In order, together all of it."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Index:
    """What checkpoint.json says."""

    content: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, Card]
    digest: str


def text(content: Mapping[str, Any]) -> bytes:
    """checkpoint.json's bytes.

    Raises:
        CheckpointError: They would be more than a reader takes.
    """
    rest = b'", "checkpoint": ' + json.dumps({"format": FORMAT, **content}, allow_nan=False).encode() + b"}\n"
    made = _HEAD + hashlib.sha256(rest).hexdigest().encode() + rest
    if len(made) > MOST_BYTES:
        given = f"state of {len(made):,} bytes beside tensors"
        raise CheckpointError(explain(given, f"at most {MOST_BYTES:,}", "keep long lists of numbers as tensors"))
    return made


def read(place: Place, folder: str) -> Index:
    """Read and check checkpoint.json.

    Raises:
        CheckpointError: It is not there, has changed, is of a newer format, or contradicts itself.
    """
    where = place.file(folder, INDEX)
    try:
        raw = _raw(where, *place.opened(folder, INDEX))
        digest = hashlib.sha256(memoryview(raw)[len(_HEAD) + _HEX :]).hexdigest()
        if digest != bytes(raw[len(_HEAD) :][:_HEX]).decode("ascii", "replace"):
            raise damaged(f"{where} has changed since it was written")
        content = json.loads(raw)["checkpoint"]
        if type(content["format"]) is not int or content["format"] > FORMAT:
            given = f"{where} has format {content['format']!r}, written by {content.get('versions')}"
            do = "load it with that version or a later one"
            raise NewerError(explain(given, f"format {FORMAT} or older", do))
        files, tensors = check(content["files"], content["tensors"], content["run"])
        return Index(content=content, tensors=tensors, files=files, digest=digest)
    except OSError as error:
        given = f"{where} cannot be read: {error}"
        raise CheckpointError(explain(given, "a checkpoint written by dt.save", blocks.DO)) from None
    except _WRONG as error:
        raise damaged(f"{where} is not what dt.save writes ({type(error).__name__}: {error})") from None


def _raw(where: str, size: int, read_at: Callable[[int, memoryview], int]) -> bytearray:
    """checkpoint.json's bytes; one that is no text from some point on (a hole in a file) is not read further."""
    if size > MOST_BYTES:
        raise damaged(f"{where} has {size:,} bytes, more than dt.save writes")
    raw = bytearray()
    while len(raw) < size:
        piece = bytearray(min(blocks.BLOCK, size - len(raw)))
        got = read_at(len(raw), memoryview(piece))
        if got != len(piece) or b"\0" in piece or (not raw and not piece.startswith(_HEAD)):
            raise damaged(f"{where} is not what dt.save writes")
        raw += piece
    if not raw:
        raise damaged(f"{where} is not what dt.save writes")
    return raw


def check(
    files: Mapping[str, Any], tensors: Mapping[str, Any], run: Mapping[str, Any]
) -> tuple[dict[str, Card], dict[str, Entry]]:
    """See that an index does not contradict itself: files, parts that make whole tensors, tensors that are named.

    Raises:
        ValueError, KeyError, TypeError: It does.
    """
    cards = {name: _card(name, said) for name, said in files.items()}
    entries = {key: _entry(key, said, cards) for key, said in tensors.items()}
    _once(entries)
    missing = [key for key in named(run) if key not in entries]
    if missing:
        raise ValueError(f"there is no tensor {missing[0]!r}")
    if _depth(run) > _MOST_DEPTH:
        raise ValueError(f"state nested more than {_MOST_DEPTH} levels deep")
    return cards, entries


def _depth(value: Any) -> int:
    """How deep a nested state goes."""
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH:
        depth += 1
        insides = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [inside for one in insides for inside in one if isinstance(inside, dict | list)]
    return depth


class NewerError(CheckpointError):
    """A checkpoint of a later version of the library: not damage, so nothing older is taken in its place."""


def _card(name: str, said: dict[str, Any]) -> Card:
    size, hashes = said["bytes"], tuple(said["blocks"])
    if not _FILE.fullmatch(name) or name == INDEX:
        raise ValueError(f"file name {name!r}")
    if type(size) is not int or size < 0 or len(hashes) != -(-size // blocks.BLOCK):
        raise ValueError(f"{name}: {size} bytes in {len(hashes)} blocks")
    return Card(bytes=size, blocks=hashes)


def _entry(key: str, said: dict[str, Any], files: Mapping[str, Card]) -> Entry:
    shape = tuple(said["shape"])
    if len(shape) > MOST_DIMS or not _counts(shape) or math.prod(n for n in shape if n) > _MOST:
        raise ValueError(f"shape of {key!r}")
    stride = tuple(said["stride"]) if "stride" in said else None
    if stride is not None and not (_counts(stride) and _dense(shape, stride)):
        raise ValueError(f"strides of {key!r}")
    parts = tuple(Part(file=file, name=name, start=start, stop=stop) for file, name, start, stop in said["parts"])
    at = 0
    for part in parts:
        if part.file not in files or type(part.name) is not str or not _counts((part.start, part.stop)):
            raise ValueError(f"parts of {key!r}")
        if part.start != at or part.stop < part.start:
            raise ValueError(f"parts of {key!r}")
        at = part.stop
    entry = Entry(shape=shape, dtype=DTYPES[said["dtype"]], stride=stride, parts=parts)
    if at != entry.numel or not parts:
        raise ValueError(f"{key!r} has {at} of {entry.numel} elements")
    return entry


def _counts(numbers: tuple[Any, ...]) -> bool:
    """Whether all are whole numbers that torch can count with."""
    return all(type(n) is int and 0 <= n <= _MOST for n in numbers)


def _once(tensors: Mapping[str, Entry]) -> None:
    """Each stored part is used once: a checkpoint unfolds to no more than its files hold."""
    seen: set[tuple[str, str]] = set()
    for key, entry in tensors.items():
        for part in entry.parts:
            if (part.file, part.name) in seen:
                raise ValueError(f"a part of {key!r} is used twice")
            seen.add((part.file, part.name))


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def named(value: Any) -> list[str]:
    """The tensors that a nested state refers to."""
    found, todo = [], [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            if len(one) == 1 and "$tensor" in one:
                found.append(one["$tensor"])
            else:
                todo += one.values()
    return found


class Reader:
    """A checkpoint's tensors, by range."""

    def __init__(self, place: Place, folder: str, index: Index) -> None:
        self.place, self.folder, self.index = place, folder, index
        self._kept = blocks.Kept()
        self._files: dict[str, tuple[Blocks, dict[str, tuple[torch.dtype, tuple[int, ...], int]]]] = {}

    def _file(self, name: str) -> tuple[Blocks, dict[str, tuple[torch.dtype, tuple[int, ...], int]]]:
        if name not in self._files:
            if len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files)))
            said = self.place.file(self.folder, name)
            try:
                size, read = self.place.opened(self.folder, name)
                opened = Blocks(said, self.index.files[name], size, read, self._kept)
                self._files[name] = opened, opened.header()
            except FileNotFoundError:
                raise damaged(f"{said} is missing") from None
            except OSError as error:
                raise damaged(f"{said} cannot be read: {error}") from None
            except _WRONG as error:
                raise damaged(f"{said} is not what dt.save writes ({type(error).__name__}: {error})") from None
        return self._files[name]

    def check(self, share: int, shares: int) -> None:
        """Read this share of all blocks and see that each is as it was written; every file's header too."""
        number = 0
        for name in sorted(self.index.files):
            count = len(self.index.files[name].blocks)
            self.check_file(name, [block for block in range(count) if (number + block) % shares == share])
            number += count
        for name in self.strangers():
            raise damaged(f"{self.place.file(self.folder, name)} does not belong to this checkpoint")

    def check_file(self, name: str, numbers: Iterable[int]) -> None:
        """See that a file's header has all parts it should, and that these blocks are as they were written."""
        file, header = self._file(name)
        for key, entry, part in self._parts.get(name, ()):
            self._look_up(key, entry, part, header)
        for number in numbers:
            try:
                file.block(number)
            except OSError as error:
                raise damaged(f"{file.name} cannot be read: {error}") from None

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, Entry, Part]]]:
        """What each file should hold."""
        found: dict[str, list[tuple[str, Entry, Part]]] = {}
        for key, entry in self.index.tensors.items():
            for part in entry.parts:
                found.setdefault(part.file, []).append((key, entry, part))
        return found

    def strangers(self) -> list[str]:
        """Files that look like a checkpoint's and are not in this one's list."""
        extra = self.place.files(self.folder).keys() - self.index.files.keys() - {INDEX}
        return sorted(name for name in extra if _FILE.fullmatch(name))

    def _look_up(self, key: str, entry: Entry, part: Part, header: Mapping[str, Any]) -> int:
        """The first byte of a part in its file."""
        dtype, shape, first = header.get(part.name, (None, (), 0))
        if dtype != entry.dtype or math.prod(shape) != part.stop - part.start:
            raise damaged(f"{part.file} has no part of {key!r} as {INDEX} says")
        return int(first)

    def where(self, key: str) -> tuple[str, int]:
        """Where a tensor begins: reading in this order reads every block once."""
        entry = self.index.tensors[key]
        part = entry.parts[0]
        return part.file, self._look_up(key, entry, part, self._file(part.file)[1])

    def read(self, key: str, low: int, high: int) -> torch.Tensor:
        """Elements `low` to `high` in the order they were counted in, on the host."""
        entry = self.index.tensors[key]
        out = torch.empty(high - low, dtype=entry.dtype, device="cpu")
        self.read_into(key, low, out)
        return out

    def read_into(self, key: str, low: int, out: torch.Tensor) -> None:
        """Fill `out`, one-dimensional on the host, with elements from `low` on."""
        entry = self.index.tensors[key]
        memory = blocks.memory_of(out) if out.numel() else memoryview(b"")
        size = entry.dtype.itemsize
        for part in entry.parts:
            a, b = max(low, part.start), min(low + out.numel(), part.stop)
            if a < b:
                file, header = self._file(part.file)
                first = self._look_up(key, entry, part, header)
                try:
                    file.read(first + (a - part.start) * size, memory[(a - low) * size : (b - low) * size])
                except OSError as error:
                    raise damaged(f"{file.name} cannot be read: {error}") from None

    def whole(self, key: str) -> torch.Tensor:
        """A tensor as it was."""
        entry = self.index.tensors[key]
        flat = self.read(key, 0, entry.numel)
        return flat.view(entry.shape) if entry.stride is None else flat.as_strided(entry.shape, entry.stride)

    def ordered(self, key: str, stride: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        """Elements `low` to `high`, counted in the memory order of a tensor with these strides."""
        entry = self.index.tensors[key]
        have = entry.stride or tuple(torch.empty(entry.shape, device="meta").stride())
        if have == stride or entry.numel <= 1 or len([n for n in entry.shape if n > 1]) < 2:
            return self.read(key, low, high)
        same = torch.empty_strided(entry.shape, stride, dtype=entry.dtype, device="cpu").copy_(self.whole(key))
        return same.as_strided((entry.numel,), (1,))[low:high].clone()
