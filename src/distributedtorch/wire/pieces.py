"""Codes that are made piece by piece, for pieces that stay in the processor's cache.

Every step of a code's arithmetic writes a temporary. As large as a bucket it is fresh memory each time, whose pages the
kernel has to give first: that takes several times as long as the arithmetic. So all pieces share one room for what is
on the way. On accelerators, where torch keeps memory, all pieces are coded at once: to the same bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from distributedtorch.core.wire import Code, is_finite

PIECE = 1 << 19
"""Numbers that are coded together."""
_UNIT = 2048
"""Blocks of every code fill this up."""


class InPieces(Code):
    """A code of many numbers: the codes of its pieces, one after the other."""

    @abstractmethod
    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size of a piece's code."""

    @abstractmethod
    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        """Write the code of each row, a piece, into a row of bytes; `room`: for as many numbers, in whole units."""

    @abstractmethod
    def _decode(self, code: Tensor, rows: Tensor) -> None:
        """Write the numbers of each row of bytes into a row."""

    def _take_out(self, rows: Tensor, code: Tensor, used: Tensor, found: Tensor) -> None:
        """Subtract a code's numbers from the rows it was made of; `used`: what `_encode` left there, `found`: room."""
        read = found[: rows.numel()].view(rows.shape)
        self._decode(code, read)
        rows -= read

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        whole, rest = divmod(numel, PIECE)
        return (whole * self._bytes(PIECE, dtype) if whole else 0) + (self._bytes(rest, dtype) if rest else 0)

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        noise = None if draw is None else Noise(draw)
        code = torch.empty(self.bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        room = self._room(values, torch.promote_types(values.dtype, torch.float32))
        for rows, part in self._rows(values, code):
            self._encode(rows, part, room[: _whole(rows.numel())], noise)
        return code

    def encode_more(self, values: Tensor, left: Tensor, key: int, draw: torch.Generator | None) -> Tensor | None:
        noise = None if draw is None else Noise(draw)
        code = torch.empty(self.bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        room = self._room(values, torch.promote_types(values.dtype, torch.float32))
        found, finite = self._room(values, values.dtype), True
        for (rows, part), (rest, _) in zip(self._rows(values, code), self._rows(left, code), strict=True):
            rest += rows
            used = room[: _whole(rest.numel())]
            self._encode(rest, part, used, noise)
            self._take_out(rest, part, used, found)
            finite = finite and is_finite(rest)
        return code if finite else None

    def put(self, code: Tensor, out: Tensor, key: int) -> None:
        for rows, part in self._rows(out, code):
            self._decode(part, rows)

    def add(self, code: Tensor, out: Tensor, key: int, *, times: int = 1) -> None:
        room = self._room(out, out.dtype)
        for rows, part in self._rows(out, code):
            found = room[: rows.numel()].view(rows.shape)
            self._decode(part, found)
            rows.add_(found, alpha=times)

    def _room(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        most = min(values.numel(), PIECE) if values.device.type == "cpu" else values.numel()
        return torch.empty(_whole(most), dtype=dtype, device=values.device)

    def _rows(self, values: Tensor, code: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the pieces, those that are computed at once as rows, with views of their codes."""
        whole, size = values.numel() // PIECE, self._bytes(PIECE, values.dtype)
        at_once = 1 if values.device.type == "cpu" else max(1, whole)
        for first in range(0, whole, at_once):
            yield (
                values[first * PIECE : (first + at_once) * PIECE].view(at_once, PIECE),
                code[first * size : (first + at_once) * size].view(at_once, size),
            )
        if values.numel() % PIECE:
            yield values[whole * PIECE :].view(1, -1), code[whole * size :].view(1, -1)


class Noise:
    """Random numbers between 0 and 1 for rounding, as likely as each other, any two of one code nearly independent.

    Drawing them all would cost more than everything else, and so would moving them. So they are taken from a table as
    they are, which has as many equally spaced numbers as a piece, in random order; the place is drawn for each piece.
    """

    def __init__(self, draw: torch.Generator) -> None:
        self.draw = draw

    def of(self, rows: Tensor) -> Tensor:
        """As many as rows have that are the blocks of a piece, or of several."""
        table, each = _table(rows.device, rows.dtype), min(rows.numel(), PIECE)
        firsts = torch.randint(PIECE, (max(1, rows.numel() // PIECE),), generator=self.draw).tolist()
        parts = [table[first : first + each] for first in firsts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows.shape)


@cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of two pieces' length: it begins again after one."""
    order = torch.randperm(PIECE, generator=torch.Generator().manual_seed(PIECE)).double()
    return ((order + 0.5) / PIECE).repeat(2).to(device, dtype)


def place(code: Tensor, first: int, columns: int, dtype: torch.dtype) -> Tensor:
    """So many numbers of each row of a code, from a byte on, to write to: a code of one's own begins where all fit."""
    part = code[:, first : first + columns * dtype.itemsize]
    return part[0].view(dtype).unsqueeze(0) if len(part) == 1 else part.view(dtype)


def typed(code: Tensor, first: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The same to read: a copy where the code lies at an address that does not fit the type."""
    if (code.data_ptr() + first) % dtype.itemsize or (code.storage_offset() + first) % dtype.itemsize:
        return place(code[:, first:].clone(memory_format=torch.contiguous_format), 0, columns, dtype)
    return place(code, first, columns, dtype)


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """Rows cut into rows of `block`, the last one of a single row filled up with zeros."""
    missing = -rows.shape[1] % block
    return (torch.nn.functional.pad(rows, (0, missing)) if missing else rows).reshape(-1, block)


def write_scaled(rows: Tensor, blocks: Tensor, scale: Tensor) -> None:
    """Write blocks of numbers in a shorter type, each times its scale, into the rows that they were cut from."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.dtype == wide and blocks.numel() == rows.numel():
        rows.view(blocks.shape).copy_(blocks).mul_(scale)
    else:
        rows.copy_(blocks.to(wide).mul_(scale).view(len(rows), -1)[:, : rows.shape[1]])


def blocks_of(numel: int, block: int) -> int:
    """In how many rows."""
    return -(-numel // block)


def largest(rows: Tensor, room: Tensor) -> Tensor:
    """The largest number of each row, without its sign; `room`: for as many numbers."""
    return torch.abs(rows, out=room[: rows.numel()].view(rows.shape)).amax(dim=1)


def _whole(numel: int) -> int:
    return _UNIT * blocks_of(numel, _UNIT)
