"""Tensors in one message: of each the form in which it is there, its size, and its bytes; all checked before use.

Forms: plain numbers; rows of a table (their numbers in rising order, then their values); a code of a wire.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from distributedtorch.core.wire import SMALL, Code
from distributedtorch.serve.board import Refused

_ALIGN, _ENTRY, _PLACE = 64, 16, 8


class Form(IntEnum):
    """How a tensor is there."""

    NONE = 0
    """Not at all: no gradient, or nothing new."""
    PLAIN = 1
    ROWS = 2
    CODE = 3


Part = tuple[Form, Tensor | None]
"""A form, and the bytes where there are any."""
ABSENT: Part = (Form.NONE, None)


def joined(parts: Sequence[Part]) -> Tensor:
    """One message of some parts."""
    sizes = [0 if data is None else data.numel() for _, data in parts]
    starts = [_first(len(parts))]
    for size in sizes:
        starts.append(_aligned(starts[-1] + size))
    message = torch.zeros(starts[-1], dtype=torch.uint8)
    entries = [(len(parts), 0), *((int(form), size) for (form, _), size in zip(parts, sizes, strict=True))]
    message[: _ENTRY * len(entries)] = torch.tensor(entries, dtype=torch.int64).view(-1).view(torch.uint8)
    for (_, data), start, size in zip(parts, starts, sizes, strict=False):
        if data is not None:
            message[start : start + size].copy_(data)
    return message


def parted(message: Tensor, count: int) -> list[tuple[Form, Tensor]]:
    """The parts of a message.

    Raises:
        Refused: It has not so many, or is not as long as they say.
    """
    at, whole = _first(count), message.numel()
    if whole < at:
        raise Refused(f"{whole} bytes, at least {at} needed: of another model?")
    said, *head = message[: _ENTRY * (count + 1)].view(torch.int64).view(count + 1, 2).tolist()
    if said[0] != count:
        raise Refused(f"{said[0]} tensors in a message, {count} needed: of another model?")
    found = []
    for number, (form, size) in enumerate(head):
        if form not in set(Form) or not 0 <= size <= whole - at or (form == Form.NONE and size):
            raise Refused(f"part {number} of form {form} and {size} bytes in a message of {whole}: of another model?")
        found.append((Form(form), message[at : at + size]))
        at = _aligned(at + size)
    if at != whole:
        raise Refused(f"{whole} bytes, {at} needed: of another model?")
    return found


def largest(sizes: Sequence[int]) -> int:
    """The size of a message whose parts have at most these sizes."""
    return _first(len(sizes)) + sum(map(_aligned, sizes))


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, not copied where they lie in order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def plain(tensor: Tensor) -> Part:
    """A tensor as it is."""
    return Form.PLAIN, raw(tensor)


def rows(tensor: Tensor) -> Part:
    """The rows that a sparse tensor has."""
    tensor = tensor.detach().coalesce()
    return Form.ROWS, torch.cat([raw(tensor.indices()[0]), raw(tensor.values())])


def key(*words: object) -> int:
    """What both ends know of one code: the same for the same words."""
    return zlib.crc32(" ".join(map(str, words)).encode())


def sparse(numbers: Tensor, values: Tensor, shape: Sequence[int], *, ordered: bool = True) -> Tensor:
    """A table of some rows; `ordered`: each is there once, in rising order."""
    return torch.sparse_coo_tensor(
        numbers.unsqueeze(0), values, tuple(shape), is_coalesced=ordered, check_invariants=False
    )


class Item:
    """One tensor that a server keeps: how it travels."""

    def __init__(self, like: Tensor, *, table: bool = False, code: Code | None = None) -> None:
        self.shape, self.dtype, self.numel, self.table = like.shape, like.dtype, like.numel(), table
        coded = not table and like.is_floating_point() and self.numel >= SMALL
        self.code = code if coded else None
        self.pushed = Form.ROWS if table else Form.PLAIN if self.code is None else Form.CODE
        """The form in which gradients or changes of it come."""

    @property
    def bytes(self) -> int:
        """As it is."""
        return self.numel * self.dtype.itemsize

    @property
    def bytes_row(self) -> int:
        """Of one row of a table, with its number."""
        return _PLACE + self.shape[1:].numel() * self.dtype.itemsize

    @property
    def most(self) -> int:
        """The largest part that may be there of it."""
        sizes = [self.bytes, self.bytes_row * self.shape[0] if self.table else 0]
        return max([*sizes, self.code.bytes(self.numel, self.dtype) if self.code else 0])

    def read(self, form: Form, data: Tensor, known: int) -> Tensor:
        """What a part says: a tensor of this one's shape, sparse where only rows are there; `known`: the code's key.

        Raises:
            Refused: Another form or length, or rows that are not in this table.
        """
        if form is Form.PLAIN:
            self._long(data, self.bytes)
            return data.view(self.dtype).view(self.shape)
        if form is Form.ROWS and self.table:
            return self._rows(data)
        if form is Form.CODE and self.code is not None:
            self._long(data, self.code.bytes(self.numel, self.dtype))
            try:
                return self.code.decode(data, self.numel, self.dtype, known).view(self.shape)
            except (IndexError, RuntimeError) as error:
                raise Refused(f"a code that cannot be read: {error}") from error
        raise Refused(f"a tensor of shape {tuple(self.shape)} in the form {form.name}: of another model?")

    def _long(self, data: Tensor, needed: int) -> None:
        if data.numel() != needed:
            raise Refused(f"{data.numel()} bytes of a tensor, {needed} needed: of another model?")

    def _rows(self, data: Tensor) -> Tensor:
        count, rest = divmod(data.numel(), self.bytes_row)
        if rest or count > self.shape[0]:
            raise Refused(f"{data.numel()} bytes of rows of {self.bytes_row} for a table of {self.shape[0]} rows")
        numbers = data[: _PLACE * count].view(torch.int64)
        if count and (int(numbers[0]) < 0 or int(numbers[-1]) >= self.shape[0]):
            raise Refused(f"rows {int(numbers[0])} to {int(numbers[-1])} of a table of {self.shape[0]} rows")
        if bool((numbers[1:] <= numbers[:-1]).any()):
            raise Refused("rows that are not in rising order, or there twice")
        values = data[_PLACE * count :].view(self.dtype).view(count, *self.shape[1:])
        return sparse(numbers, values, self.shape)

    def take(self, form: Form, data: Tensor, known: int, place: Tensor) -> None:
        """Bring a copy of the tensor to what a server says: whole, some rows, or a code of what is to be added."""
        if form is Form.NONE:
            return
        value = self.read(form, data, known)
        if form is Form.PLAIN:
            place.copy_(value)
        elif form is Form.ROWS:
            place.index_copy_(0, value.indices()[0].to(place.device), value.values().to(place.device))
        else:
            place.add_(value.to(place.device))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _first(count: int) -> int:
    """Where the first of so many parts begins: before it, their number, and an entry for each."""
    return _aligned(_ENTRY * (count + 1))
