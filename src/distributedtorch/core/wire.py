"""The contract of a wire: how sums over ranks travel. Final classes live in `wire/`.

A wire that makes numbers smaller leaves something out. What it leaves out of a sum it keeps and adds to the next one
(error feedback), unless its rounding is right on average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slab, Slot, lay_out
from distributedtorch.core.comm import Comm, Pending

_AHEAD = 1
TURN = "~"
"""In the name of an exchange: it is the other one of two that are under way at once, and take turns."""
SMALL = 1024
"""Parameters of fewer elements travel as they are, and so do complex and whole numbers."""
PIECE = 1 << 18
"""Numbers that are coded together: a multiple of every block, small beside a processor's cache."""
WHOLE = 1 << 62
"""As a piece: all numbers are coded together."""


class Wire(ABC):
    """How sums over ranks travel."""

    cuts: bool = True
    """Whether a large parameter may travel in several exchanges."""
    lossy: bool = True
    """Whether something may be left out of a sum."""

    @abstractmethod
    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        """Sum `flat[bounds[0]:bounds[-1]]` over ranks, the same result everywhere; `slots` are the parameters in it."""

    @abstractmethod
    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        """As `all_reduce`, for this rank's range only, into `out` or where it lies."""

    def state(self) -> dict[str, Tensor]:
        """What this rank has left out of sums so far, by exchange."""
        return {}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        return


def both(name: str) -> str:
    """What two exchanges that take turns are called together: what the one leaves out, the other adds."""
    return name.replace(TURN, "")


def travelling(
    params: Sequence[Tensor], wire: Wire, world: int, *, whole: bool = False, blocks: Sequence[int] = ()
) -> list[Slab]:
    """How parameters lie in memory whose sums travel by a wire: small ones together, where it treats them apart."""
    kinds = [int(param.numel() >= SMALL) for param in params] if wire.lossy else []
    return lay_out(params, world, whole=whole, blocks=blocks, kinds=kinds, cut=wire.cuts)


def is_plain(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    """Whether an exchange is of what no wire makes smaller: small parameters only, or no real numbers."""
    return not dtype.is_floating_point or all(slot.numel < SMALL for slot in slots)


def sums(
    comm: Comm, wire: Wire, name: str, slabs: Sequence[Slab], fill: Callable[[int], Tensor]
) -> Iterator[tuple[Slab, Tensor]]:
    """Each slab's sum over ranks of what `fill` gives for each of its parameters, in memory for a while.

    The next slab begins to travel before the last has arrived.
    """

    def begin(number: int, slab: Slab) -> tuple[Slab, Tensor, list[Pending]]:
        flat = comm.pool.borrow(slab.numel, slab.dtype, slab.device, shared=True)
        flat[sum(slot.numel for slot in slab.slots) :].zero_()
        for slot in slab.slots:
            slot.view(flat).copy_(fill(slot.index))
        slots = {slot.index: slot for slot in slab.slots}
        pending = [
            wire.all_reduce(f"{name}/{number}.{k}", flat, bucket.bounds, [slots[index] for index in bucket.slots])
            for k, bucket in enumerate(slab.buckets)
        ]
        return slab, flat, pending

    travelling_: deque[tuple[Slab, Tensor, list[Pending]]] = deque()
    for number, next_ in enumerate([*slabs, None]):
        if next_ is not None:
            travelling_.append(begin(number, next_))
        while len(travelling_) > (_AHEAD if next_ is not None else 0):
            slab, flat, pending = travelling_.popleft()
            for one in pending:
                one.advance()
            for one in pending:
                one.wait()
            yield slab, flat
            comm.pool.give_back([flat])


class Code(ABC):
    """A form for numbers that takes fewer bytes, the same number of bytes for the same number of elements.

    Many numbers are coded in pieces that stay in the processor's cache, one after the other: large temporaries take
    ten times as long. `key` is the same on all ranks in one exchange and another in the next; `draw` is drawn from
    where a rank needs random numbers of its own. Without it numbers are rounded to the nearest: where nothing is summed
    up over time.
    """

    feedback: ClassVar[bool]
    """Whether what it leaves out must be kept for the next time: its rounding is not right on average."""
    piece: ClassVar[int] = PIECE
    """How many numbers are coded together."""

    @abstractmethod
    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size of a piece's code."""

    @abstractmethod
    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        """The code of a piece, as bytes."""

    @abstractmethod
    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        """The values of a piece."""

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size of a code."""
        whole, rest = divmod(numel, self.piece)
        return (whole * self._bytes(self.piece, dtype) if whole else 0) + (self._bytes(rest, dtype) if rest else 0)

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        """The code of one-dimensional values, as bytes."""
        noise = None if draw is None else Noise(draw, values.numel())
        if 0 < values.numel() <= self.piece:
            return self._encode(values, key, noise)
        code = torch.empty(self.bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        for piece, part in self._pieces(code, values):
            part.copy_(self._encode(piece, key, noise))
        return code

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        """The values of a code."""
        out = torch.empty(numel, dtype=dtype, device=code.device)
        self.put(code, out, key)
        return out

    def put(self, code: Tensor, out: Tensor, key: int) -> None:
        """Write the values of a code."""
        for values, part in self._pieces(code, out):
            values.copy_(self._decode(part, values.numel(), values.dtype, key))

    def add(self, code: Tensor, out: Tensor, key: int, *, times: int = 1) -> None:
        """Add so many times the values of a code."""
        for values, part in self._pieces(code, out):
            values.add_(self._decode(part, values.numel(), values.dtype, key), alpha=times)

    def _pieces(self, code: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Values piece by piece, each with its part of the code."""
        at = 0
        for low in range(0, values.numel(), self.piece):
            piece = values[low : low + self.piece]
            size = self._bytes(piece.numel(), values.dtype)
            yield piece, code[at : at + size]
            at += size


class Noise:
    """Random numbers between 0 and 1 for rounding, each right by itself; pieces after the first share some.

    Drawing them costs more than everything else a code does: no more are drawn than two pieces have, and every piece
    takes a stretch of them that begins at random.
    """

    def __init__(self, draw: torch.Generator, numel: int) -> None:
        self.draw, self.numel = draw, numel
        self.drawn: Tensor | None = None

    def rows(self, like: Tensor) -> Tensor:
        """As many as there are numbers in `like`, in rows as long."""
        count, width = like.shape
        if self.drawn is None:
            most = min(blocks_of(self.numel, width), 2 * count)
            self.drawn = torch.rand(most, width, generator=self.draw, dtype=like.dtype).to(like.device)
        spare = len(self.drawn) - count
        first = int(torch.randint(spare + 1, (), generator=self.draw)) if spare else 0
        return self.drawn[first : first + count]


def pack(*parts: Tensor) -> Tensor:
    """Tensors of any types put one after the other, as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(code: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """What `pack` was given, by number of elements and type."""
    found, at = [], 0
    for numel, dtype in parts:
        size = numel * dtype.itemsize
        found.append(code[at : at + size].clone().view(dtype))  # a copy: views need addresses that fit their type
        at += size
    return found


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Values in rows of `block`, the last one filled up with zeros."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)


def blocks_of(numel: int, block: int) -> int:
    """In how many rows."""
    return -(-numel // block)


def largest(rows: Tensor) -> Tensor:
    """The largest number of each row, without its sign."""
    return torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
