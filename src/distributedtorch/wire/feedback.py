"""Sums of codes: each rank sends codes of its numbers to who sums them, and gets a code of the sum.

Holds what both codes left out, where a code is not right on average: as much as the gradients, and an N-th of that.
Travels per rank: 2c(N-1)/N for codes of c bytes over N ranks. Always over gloo: memory that ranks share needs no codes.
All ranks, the one that summed too, go on with the decoded sum, so that replicas stay the same to the bit.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.pairs import Posted, wait_all
from distributedtorch.core.wire import SMALL, Code, Wire

_SENT, _SUMMED = "sent", "summed"


class Coded(Wire):
    """Sums of codes, with error feedback."""

    def __init__(self, comm: Comm, code: Code) -> None:
        self.comm, self.code = comm, code
        self.left: dict[str, Tensor] = {}
        """By exchange and half of it, what codes left out."""
        self.counts: dict[str, int] = defaultdict(int)

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        if all(slot.numel < SMALL for slot in slots):
            return self.comm.all_reduce(name, flat, bounds)
        end = max(slot.start + slot.numel for slot in slots)
        flat[max(end, bounds[0]) : bounds[-1]].zero_()  # a decoded sum may stand in the padding
        self.counts[name] += 1
        return _Sum(self, name, flat, bounds).pending

    def reduced(self, which: str, values: Tensor, key: int, draw: torch.Generator) -> Tensor:
        """A code of values and of what was left out before; what it leaves out is kept."""
        if not self.code.feedback:
            return self.code.encode(values, key, draw)
        before = self.left.get(which)
        values = values.clone() if before is None else values + before
        code = self.code.encode(values, key, draw)
        self.left[which] = values - self.code.decode(code, values.numel(), values.dtype, key)
        return code

    def state(self) -> dict[str, Tensor]:
        return {**self.left, **{f"count/{name}": torch.tensor(count) for name, count in self.counts.items()}}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        counts = {name for name in state if name.startswith("count/")}
        self.left = {name: value.clone() for name, value in state.items() if name not in counts}
        self.counts = defaultdict(int, {name.removeprefix("count/"): int(state[name]) for name in counts})


class _Sum:
    """One sum under way."""

    def __init__(self, wire: Coded, name: str, flat: Tensor, bounds: Sequence[int]) -> None:
        self.wire, self.comm, self.name, self.flat, self.bounds = wire, wire.comm, name, flat, bounds
        self.key = zlib.crc32(f"{name} {wire.counts[name]}".encode())
        self.draw = torch.Generator().manual_seed(self.key * self.comm.world + self.comm.rank)
        ranks = range(self.comm.world)
        pieces = [bounds[k + 1] - bounds[k] for k in ranks]
        self.sizes = [wire.code.bytes(numel, flat.dtype) if numel else 0 for numel in pieces]
        self.codes = [self._code(f"{_SENT}/{name}/{k}", flat[bounds[k] : bounds[k + 1]]) for k in ranks]
        mine = self.sizes[self.comm.rank]
        self.parts = [torch.empty(mine, dtype=torch.uint8) for _ in ranks]
        self.parts[self.comm.rank] = self.codes[self.comm.rank]
        self.sums = [torch.empty(size, dtype=torch.uint8) for size in self.sizes]
        given = sum(self.sizes) - mine + mine * (self.comm.world - 1)
        self.comm.count_sent("all-reduce", given)
        self.works = self.comm.pairs.swap(f"{name}/codes", self.codes, self.parts)
        self.pending = Pending(self.comm, "all-reduce", name)
        self.pending.work = Posted()
        self.comm.pairs.progress.hand_over(self.pending.work, self._sum_up)
        self.pending.tail.append(self._land)

    def _code(self, which: str, values: Tensor) -> Tensor:
        if not values.numel():
            return torch.empty(0, dtype=torch.uint8)
        return self.wire.reduced(which, values, self.key, self.draw).to("cpu")

    def _decoded(self, code: Tensor, rank: int) -> Tensor:
        numel = self.bounds[rank + 1] - self.bounds[rank]
        return self.wire.code.decode(code.to(self.flat.device), numel, self.flat.dtype, self.key)

    def _sum_up(self) -> None:
        """In a thread: sum this rank's range in rank order, and give the others a code of it."""
        wait_all(self.works)
        rank = self.comm.rank
        if self.sizes[rank]:
            total = self._decoded(self.parts[0], rank)
            for part in self.parts[1:]:
                total += self._decoded(part, rank)
            self.sums[rank] = self._code(f"{_SUMMED}/{self.name}", total)
        given = [self.sums[rank]] * self.comm.world
        self.works = self.comm.pairs.swap(f"{self.name}/sums", given, self.sums)

    def _land(self) -> None:
        wait_all(self.works)
        for rank, code in enumerate(self.sums):
            if self.sizes[rank]:
                self.flat[self.bounds[rank] : self.bounds[rank + 1]] = self._decoded(code, rank)
