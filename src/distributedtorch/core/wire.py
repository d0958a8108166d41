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

_AHEAD = 4
"""Slabs that travel before the first is waited for: with one, a link and a processor of 1 Gbit/s idle by turns."""
TURN = "~"
"""In the name of an exchange: it is the other one of two that are under way at once, and take turns."""
SMALL = 1024
"""Parameters of fewer elements travel as they are, and so do complex and whole numbers."""


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
    params: Sequence[Tensor],
    wire: Wire,
    world: int,
    *,
    whole: bool = False,
    blocks: Sequence[int] = (),
    owned: bool = True,
) -> list[Slab]:
    """How parameters lie in memory whose sums travel by a wire: small ones together, where it treats them apart."""
    kinds = [int(param.numel() >= SMALL) for param in params] if wire.lossy else []
    return lay_out(params, world, whole=whole, blocks=blocks, kinds=kinds, cut=wire.cuts, owned=owned)


def is_plain(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    """Whether an exchange is of what no wire makes smaller: small parameters only, or no real numbers."""
    return not dtype.is_floating_point or all(slot.numel < SMALL for slot in slots)


def is_finite(values: Tensor) -> bool:
    """Whether all numbers are: their sum is then, unless they are huge."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


class SlabSum:
    """The sum over ranks of one slab of what `fill` writes for each of its parameters, under way."""

    def __init__(self, comm: Comm, wire: Wire, name: str, slab: Slab, fill: Callable[[int, Tensor], object]) -> None:
        self.comm, self.slab = comm, slab
        self.flat = comm.pool.borrow(slab.numel, slab.dtype, slab.device, shared=True)
        self.flat[sum(slot.numel for slot in slab.slots) :].zero_()
        for slot in slab.slots:
            fill(slot.index, slot.view(self.flat))
        slots = {slot.index: slot for slot in slab.slots}
        self.pending = [
            wire.all_reduce(f"{name}.{k}", self.flat, bucket.bounds, [slots[index] for index in bucket.slots])
            for k, bucket in enumerate(slab.buckets)
        ]

    def starts(self) -> bool:
        """Take sums on, as far as that holds nobody, in order. Result: whether all of them have begun as a whole."""
        return all(one.starts() for one in self.pending)

    def wait(self) -> Tensor:
        """The sum, in memory that is lent."""
        for one in self.pending:
            one.advance()
        for one in self.pending:
            one.wait()
        return self.flat

    def give_back(self) -> None:
        """The memory is not looked at any more."""
        self.comm.pool.give_back([self.flat])


def sums(
    comm: Comm, wire: Wire, name: str, slabs: Sequence[Slab], fill: Callable[[int, Tensor], object]
) -> Iterator[tuple[Slab, Tensor]]:
    """Each slab's sum over ranks of what `fill` writes for each of its parameters, in memory for a while.

    The next slabs begin to travel before the last has arrived.
    """
    under_way: deque[SlabSum] = deque()
    for number, next_ in enumerate([*slabs, None]):
        if next_ is not None:
            under_way.append(SlabSum(comm, wire, f"{name}/{number}", next_, fill))
        while len(under_way) > (_AHEAD if next_ is not None else 0):
            first = under_way.popleft()
            yield first.slab, first.wait()
            first.give_back()


class Code(ABC):
    """A form for numbers that takes fewer bytes, the same number of bytes for the same number of elements.

    `key` is the same on all ranks in one exchange and another in the next; `draw` is drawn from where a rank needs
    random numbers of its own. Without it numbers are rounded to the nearest: where nothing is summed up over time.
    """

    feedback: ClassVar[bool]
    """Whether what it leaves out must be kept for the next time: its rounding is not right on average."""

    @abstractmethod
    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size of a code."""

    @abstractmethod
    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        """The code of one-dimensional values, as bytes."""

    @abstractmethod
    def put(self, code: Tensor, out: Tensor, key: int) -> None:
        """Write the values of a code."""

    @abstractmethod
    def add(self, code: Tensor, out: Tensor, key: int, *, times: int = 1) -> None:
        """Add the values of a code so many times."""

    def encode_more(self, values: Tensor, left: Tensor, key: int, draw: torch.Generator | None) -> Tensor | None:
        """The code of values and of what was left out before; `left` becomes what this leaves out.

        None where that is not finite: `left` is of no use then.
        """
        left += values
        code = self.encode(left, key, draw)
        self.add(code, left, key, times=-1)
        return code if is_finite(left) else None

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        """The values of a code."""
        out = torch.empty(numel, dtype=dtype, device=code.device)
        self.put(code, out, key)
        return out
