"""One file of tensors in the safetensors layout: written with a hash for every 4 MiB, read back in checked blocks.

Whoever needs a range of a tensor reads the blocks around it and no more, and never uses a byte whose block does not
have the hash it was written with. Held while reading: one block.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import CheckpointError, explain

BLOCK = 4 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Names of types in the files."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000
_MOST_DIMS = 64
DO = "check the path, or load an earlier checkpoint"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What was written into a file."""

    bytes: int
    blocks: tuple[str, ...]
    """SHA-256 of every 4 MiB, in order; the last is shorter."""


def word(dtype: torch.dtype, name: str) -> str:
    """A type's name in the files, or an error that names the tensor."""
    if dtype not in _WORDS:
        given = f"{name} is {str(dtype).removeprefix('torch.')}"
        raise CheckpointError(explain(given, "a type that safetensors files have", "convert it before dt.save"))
    return _WORDS[dtype]


def write(sink: Callable[[memoryview], Any], tensors: Sequence[tuple[str, Tensor]]) -> Hashes:
    """Write tensors to `sink`; hashes are taken in another thread meanwhile, and while the caller flushes the file.

    What lies on the host is read from where it lies until `Hashes.card` has returned; tensors on a device pass through
    host memory one by one.
    """
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())  # so that each begins at a multiple of its size
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in ordered:
        shape, size = list(tensor.shape), tensor.numel() * tensor.element_size()
        header[name] = {"dtype": word(tensor.dtype, name), "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = Hashes()
    try:
        _put(sink, hashes, memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            if tensor.numel():
                last = _put(sink, hashes, bytes_of(tensor))
                if tensor.device.type != "cpu":
                    last.result()
    except BaseException:
        hashes.close()
        raise
    return hashes


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values as bytes, in row-major order: its own memory where it lies so on the host."""
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memory_of(host)


def memory_of(flat: Tensor) -> memoryview:
    """The memory of a one-dimensional tensor on the host."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _put(sink: Callable[[memoryview], Any], hashes: Hashes, content: memoryview) -> Future[None]:
    for piece in hashes.cut(content):
        hashed = hashes.add(piece)
        sink(piece)
    return hashed


class Hashes:
    """The hash of every block of what is written."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "distributedtorch-hash")
        self._last: Future[None] = Future()

    def cut(self, content: memoryview) -> Iterator[memoryview]:
        """Content in pieces that end where blocks end."""
        at = 0
        while at < len(content):
            room = BLOCK - self.size % BLOCK
            yield content[at : at + room]
            at += room

    def add(self, piece: memoryview) -> Future[None]:
        """Take the hash of what comes next; it must not change until that is done."""
        self.size += len(piece)
        ends = self.size % BLOCK == 0
        try:
            self._last = self._thread.submit(self._add, piece, ends)
        except RuntimeError:  # at exit there are no new threads
            self._add(piece, ends)
            self._last = Future()
            self._last.set_result(None)
        return self._last

    def _add(self, piece: memoryview, ends: bool) -> None:
        self._hash.update(piece)
        if ends:
            self._end()

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()

    def card(self) -> Card:
        """What was written, when all of it is hashed."""
        self._last.result()
        if self.size % BLOCK:
            self._end()
        self.close()
        return Card(bytes=self.size, blocks=tuple(self._done))

    def close(self) -> None:
        """Take no more."""
        self._thread.shutdown(cancel_futures=True)


class Kept:
    """Memory for one block, used in turn by all files of a reader."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")
        self.holds: tuple[str, int] | None = None
        """Whose block lies in it, by name (a circle would keep removed files on the disk), and which."""


class Blocks:
    """A file that is read in checked blocks; the last one read is kept."""

    def __init__(self, name: str, card: Card, size: int, read: Callable[[int, memoryview], int], kept: Kept) -> None:
        if size != card.bytes:
            raise damaged(f"{name} has {size:,} bytes, {card.bytes:,} were written")
        self.name, self.card, self._read, self._kept = name, card, read, kept

    def block(self, number: int) -> memoryview:
        """One block's bytes, checked; valid until the next call."""
        kept, length = self._kept, min(BLOCK, self.card.bytes - number * BLOCK)
        if kept.holds != (self.name, number):
            kept.holds = None
            if len(kept.memory) < length:
                kept.memory = memoryview(bytearray(length))
            wanted = kept.memory[:length]
            if self._read(number * BLOCK, wanted) != len(wanted):
                raise damaged(f"{self.name} ends early")
            found = hashlib.sha256(wanted).hexdigest()
            if found != self.card.blocks[number]:
                where = f"bytes {number * BLOCK:,} to {number * BLOCK + len(wanted):,}"
                raise damaged(f"{self.name} has changed since it was written ({where})")
            kept.holds = self.name, number
        return kept.memory[:length]

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        if start < 0 or start + len(out) > self.card.bytes:
            raise damaged(f"{self.name}: bytes {start} to {start + len(out)} of {self.card.bytes}")
        done = 0
        while done < len(out):
            number, inside = divmod(start + done, BLOCK)
            piece = self.block(number)[inside : inside + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def header(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """Each tensor's type, shape and first byte, with everything checked that a reader relies on."""
        size = bytearray(8)
        self.read(0, memoryview(size))
        length = int.from_bytes(size, "little")
        if length > min(_MOST_HEADER, self.card.bytes - 8):
            raise damaged(f"{self.name} has a header of {length} bytes")
        text = bytearray(length)
        self.read(8, memoryview(text))
        found, total = {}, 0
        for name, said in json.loads(text).items():
            if name == "__metadata__":
                continue
            dtype, shape = DTYPES[said["dtype"]], tuple(map(int, said["shape"]))
            start, stop = map(int, said["data_offsets"])
            if (
                len(shape) > _MOST_DIMS
                or min(shape, default=0) < 0
                or math.prod(shape) * dtype.itemsize != stop - start
                or start < 0
            ):
                raise damaged(f"{self.name}: {name!r} is said to be {shape} {said['dtype']} in {stop - start} bytes")
            if 8 + length + stop > self.card.bytes:
                raise damaged(f"{self.name} ends before {name!r} does")
            found[name] = dtype, shape, 8 + length + start
            total += stop - start
        if 8 + length + total > self.card.bytes:  # bytes that several tensors share: more than the file holds
            raise damaged(f"{self.name} is said to hold {total:,} bytes of tensors")
        return found


def damaged(given: str) -> CheckpointError:
    """The error for content that is not what was written."""
    return CheckpointError(explain(given, "the bytes that were written", DO))
