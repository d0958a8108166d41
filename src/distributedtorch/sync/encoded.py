"""Divided parameters that travel as codes (zero3 with a wire): fewer bytes each time a block is gathered.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (quantized weights).

The owner of a range keeps it exactly and updates that. The others fetch a code of it, made once for each edition; all
ranks compute with the decoded values, the owner too, so that forward and backward and all ranks have the same numbers.
It is a code of the values themselves: nobody keeps an earlier copy that a difference could be added to. What it rounds
off is not lost, the owner has it: so nothing adds up, and int8 rounds to the nearest here, not at random. Ranks of one
host read codes from the memory they share: what is computed does not depend on where ranks are.

Each rank holds beside what zero3 does: the code of its range, c Psi/N for a code of c bytes per byte.
Travels: c Psi (N-1)/N each time all parameters are gathered.
Use it where links are slow, with bf16, fp16 or int8; signs or a few of the numbers do not make a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slab
from distributedtorch.core.wire import Code, is_plain
from distributedtorch.sync.divided import Divided, Unit
from distributedtorch.sync.memory import checksum


class Encoded(Unit):
    """Parameters that are fetched together, as codes."""

    def __init__(self, memory: Divided, slab: Slab, params: Sequence[nn.Parameter], code: Code) -> None:
        self.form = code
        sizes = [code.bytes(high - low, slab.dtype) if high > low else 0 for low, high in pairwise(slab.bounds)]
        self.ends = [0, *accumulate(sizes)]
        """Where each rank's code lies among all of them."""
        self.codes: Tensor | None = None
        """All of them, while they are on their way."""
        self.shown: Tensor | None = None
        """What was seen of this rank's range after the last edit, until it is fetched again."""
        super().__init__(memory, slab, params)

    def _offered(self) -> Tensor:
        rank, pool = self.memory.comm.rank, self.memory.comm.pool
        self.code = pool.zeros(self.ends[rank + 1] - self.ends[rank], torch.uint8).copy_(self._encoded())
        return self.code

    def _encoded(self) -> Tensor:
        """The code of this rank's range."""
        return self.form.encode(self.own, 0, None).to("cpu") if self.own.numel() else torch.empty(0, dtype=torch.uint8)

    def _decoded(self, code: Tensor, numel: int) -> Tensor:
        return self.form.decode(code.to(self.slab.device), numel, self.slab.dtype, 0)

    def _fetch(self, flat: Tensor) -> None:
        comm, rank, self.shown = self.memory.comm, self.memory.comm.rank, None
        self.codes = comm.pool.borrow(self.ends[-1], torch.uint8)
        self.codes[self.ends[rank] : self.ends[rank + 1]].copy_(self.code)
        self.fetch = self.memory.pull.fetch(self.number, self.codes, self.ends)

    def _land(self, flat: Tensor) -> None:
        assert self.codes is not None
        for (low, high), (first, last) in zip(pairwise(self.slab.bounds), pairwise(self.ends), strict=True):
            if high > low:
                self.form.put(self.codes[first:last].to(flat.device), flat[low:high], 0)
        self.memory.comm.pool.give_back([self.codes])
        self.codes = None
        if self.lent is not None:
            self.lent = checksum(flat)

    def written(self, edited: Sequence[nn.Parameter] = (), *, filled: bool = False) -> None:
        """Keep of this rank's range what was written; what was not stays as exact as it was. All look again."""
        now = self.arrive()[self.range]
        if now.numel():
            self.own = torch.where(self._changed(now, {id(param) for param in edited}, filled=filled), now, self.own)
            self.shown = now.clone()
        self.code = self.memory.pull.replace(self.number, self._encoded())
        self.stale = True

    def _changed(self, now: Tensor, edited: set[int], *, filled: bool) -> Tensor:
        """Which elements were written: those that look different, and zeros where something was set to zero.

        A small value is seen as zero: one that was set to it looks the same as before. Of a parameter that was written
        to by itself every zero counts; through a view, where others became zero.
        """
        changed = now != (self._decoded(self.code, now.numel()) if self.shown is None else self.shown)
        for slot, param in zip(self.slab.slots, self.params, strict=True):
            low, high = self.slab.piece(slot, self.memory.comm.rank)
            span = slice(slot.start + low - self.range.start, slot.start + high - self.range.start)
            zero = now[span] == 0
            if id(param) in edited or (changed[span] & zero).any():
                changed[span] |= zero | (filled and id(param) in edited)
        return changed

    def updated(self) -> None:
        self.code.copy_(self._encoded())
        super().updated()

    def exact(self) -> Tensor:
        flat = self.arrive().clone()
        self.settle()
        flat[self.range] = self.own
        self.memory.comm.all_gather(f"exact/{self.number}", flat, self.slab.bounds).wait()
        return flat

    def drop(self) -> None:
        super().drop()
        self.shown = None if self.flat is None else self.shown

    def bytes_kept(self) -> int:
        return super().bytes_kept() + self.code.numel()


def by(code: Code) -> Callable[[Divided, Slab, Sequence[nn.Parameter]], Unit]:
    """What makes a unit of each slab: one that travels by this code, where it has large parameters of numbers."""

    def made(memory: Divided, slab: Slab, params: Sequence[nn.Parameter]) -> Unit:
        plain = is_plain(slab.slots, slab.dtype)
        return Unit(memory, slab, params) if plain else Encoded(memory, slab, params, code)

    return made
