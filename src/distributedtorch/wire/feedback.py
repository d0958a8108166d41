"""Sums of codes: each rank sends codes of its numbers to who sums them, and gets a code of the sum.

Who sums takes its own numbers as they are. Holds what both codes left out, where a code is not right on average: as
much as the gradients.
Travels per rank: 2c(N-1)/N for codes of c bytes over N ranks. Always over gloo: memory that ranks share needs no codes.
All ranks, the one that summed too, go on with the decoded sum, so that replicas stay the same to the bit.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.pairs import Posted, Works, wait_all
from distributedtorch.core.sync import require_like
from distributedtorch.core.wire import Code, Wire, both, is_finite, is_plain

_SENT, _SUMMED, HOSTS = "sent", "summed", "hosts"


class Coded(Wire):
    """Sums of codes, with error feedback."""

    def __init__(self, comm: Comm, code: Code, peers: Sequence[int] | None = None) -> None:
        self.comm, self.code = comm, code
        self.peers: Sequence[int] = range(comm.world) if peers is None else peers
        """The ranks that sum together; each range of a sum has one of them as owner."""
        self.left: dict[str, Tensor] = {}
        """By exchange and half of it, what codes left out."""
        self.counts: dict[str, int] = defaultdict(int)
        self.latest: dict[str, Posted] = {}
        """By exchange the last sum begun: the next one of that name adds what it leaves out."""

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        if is_plain(slots, flat.dtype):
            return self.comm.all_reduce(name, flat, bounds)
        clear_padding(flat, bounds, slots)
        return Sum(self, name, flat, bounds, None, everywhere=True).pending

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        if is_plain(slots, flat.dtype):
            return self.comm.reduce_scatter(name, flat, bounds, out)
        clear_padding(flat, bounds, slots)
        return Sum(self, name, flat, bounds, out, everywhere=False).pending

    def bring_near(self, name: str, flat: Tensor, bounds: Sequence[int], exact: Tensor) -> Pending:
        """Move what all ranks have in `flat` nearer to what each has exactly of its range, by codes of the difference.

        What a code leaves out is in the next difference: nothing more has to be kept.
        """
        return _Difference(self, name, flat, bounds, exact).pending

    def begin(self, name: str) -> tuple[int, torch.Generator]:
        """What all ranks know of the next exchange of that name, and what this one draws from in it."""
        name = both(name)
        self.counts[name] += 1
        key = zlib.crc32(f"{name} {self.counts[name]}".encode())
        return key, torch.Generator().manual_seed(key * self.comm.world + self.comm.rank)

    def swap(self, tag: int, out: Sequence[Tensor], into: Sequence[Tensor]) -> Works:
        """Give each other peer its `out` and fill each `into`."""
        none = torch.empty(0, dtype=torch.uint8)
        given, filled = [none] * self.comm.world, [none] * self.comm.world
        for peer, mine, theirs in zip(self.peers, out, into, strict=True):
            given[peer], filled[peer] = mine, theirs
        return self.comm.pairs.swap(tag, given, filled)

    def sizes(self, bounds: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Bytes of each range's code."""
        pieces = [high - low for low, high in pairwise(bounds)]
        return [self.code.bytes(numel, dtype) if numel else 0 for numel in pieces]

    def reduced(self, which: str, values: Tensor, key: int, draw: torch.Generator) -> Tensor:
        """A code of values and of what was left out before; what it leaves out is kept.

        What is not finite must reach all ranks, also where a code would leave it out: all of it becomes NaN then, and
        nothing new is kept.
        """
        if not self.code.feedback:
            return self.code.encode(values, key, draw)
        if is_finite(values):
            before = self.left.get(which)
            left = torch.zeros_like(values) if before is None else require_like(which, before, values)
            self.left[which] = left = left.to(values.device)
            if (code := self.code.encode_more(values, left, key, draw)) is not None:
                return code
            del self.left[which]  # the two together were too large
        return self.code.encode(torch.full_like(values, torch.nan), key, draw)

    def state(self) -> dict[str, Tensor]:
        return {**self.left, **{f"count/{name}": torch.tensor(count) for name, count in self.counts.items()}}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        if HOSTS in state:
            given, do = "what a wire left out was saved between hosts of several ranks", "load under another plan"
            raise CheckpointError(explain(given, "as here: each rank on its own", do))
        counts = {name for name in state if name.startswith("count/")}
        self.left = {name: value.clone() for name, value in state.items() if name not in counts}
        self.counts = defaultdict(int, {name.removeprefix("count/"): int(state[name]) for name in counts})


class Sum:
    """One sum under way, between the wire's peers: `bounds` has a range for each of them."""

    def __init__(
        self, wire: Coded, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, everywhere: bool
    ) -> None:
        self.wire, self.comm, self.name, self.flat, self.bounds = wire, wire.comm, name, flat, bounds
        self.out, self.everywhere, self.place = out, everywhere, wire.peers.index(wire.comm.rank)
        others, mine = len(wire.peers) - 1, self.place
        self.stream = torch.cuda.stream(torch.cuda.current_stream(flat.device)) if flat.is_cuda else nullcontext()
        self.key, self.draw = wire.begin(name)
        self.sizes = wire.sizes(bounds, flat.dtype)
        self.kept = both(name)
        sent = f"{_SENT}/{self.kept}"
        codes = [
            torch.empty(0, dtype=torch.uint8) if k == mine else self._code(f"{sent}/{k}", flat[low:high])
            for k, (low, high) in enumerate(pairwise(bounds))
        ]
        pool = self.comm.pool
        self.borrowed = [pool.borrow(self.sizes[mine], torch.uint8) for _ in range(others)]
        self.parts = [*self.borrowed[:mine], codes[mine], *self.borrowed[mine:]]
        self.sums = [pool.borrow(size, torch.uint8) for size in self.sizes] if everywhere else []
        self.borrowed += self.sums
        kind = "all-reduce" if everywhere else "reduce-scatter"
        back = self.sizes[mine] * others if everywhere else 0
        self.comm.count_sent(kind, sum(self.sizes) - self.sizes[mine] + back)
        self.tag = self.comm.pairs.tag(f"{name}/sums") if everywhere else 0
        self.works = wire.swap(self.comm.pairs.tag(f"{name}/codes"), codes, self.parts)
        self.posted = Posted()
        self.before, wire.latest[self.kept] = wire.latest.get(self.kept), self.posted
        self.pending = Pending(self.comm, kind, name)
        self.pending.work = self.posted
        self.comm.pairs.progress.hand_over(self.posted, self._sum_up)
        self.pending.tail.append(self.land if everywhere else self._end)

    def _code(self, which: str, values: Tensor) -> Tensor:
        if not values.numel():
            return torch.empty(0, dtype=torch.uint8)
        return self.wire.reduced(which, values, self.key, self.draw).to("cpu")

    def _sum_up(self) -> None:
        """In a thread: sum this rank's range, its own numbers first, and give the others a code of it."""
        wait_all(self.works)
        with self.stream:  # the training thread's: what it does after this comes after this on the device too
            self._sum_here()

    def _sum_here(self) -> None:
        mine, code = self.place, self.wire.code
        own = self.flat[self.bounds[mine] : self.bounds[mine + 1]]
        total = own if self.out is None else self.out.copy_(own)
        if self.sizes[mine]:
            for part in self.parts[:mine] + self.parts[mine + 1 :]:
                code.add(part.to(total.device), total, self.key)
        if self.everywhere:
            if self.before is not None:
                self.before.done.wait()
            if self.sizes[mine]:
                self.sums[mine].copy_(self._code(f"{_SUMMED}/{self.kept}", total))
            self.works = self.wire.swap(self.tag, [self.sums[mine]] * len(self.sums), self.sums)

    def land(self) -> None:
        """Wait for the last codes, and put the sum in place."""
        wait_all(self.works)
        for place, code in enumerate(self.sums):
            if self.sizes[place]:
                there = self.flat[self.bounds[place] : self.bounds[place + 1]]
                self.wire.code.put(code.to(there.device), there, self.key)
        self._end()

    def _end(self) -> None:
        self.comm.pool.give_back(self.borrowed)


class _Difference:
    """One gather under way."""

    def __init__(self, wire: Coded, name: str, flat: Tensor, bounds: Sequence[int], exact: Tensor) -> None:
        self.wire, self.flat, self.bounds, comm = wire, flat, bounds, wire.comm
        self.key, draw = wire.begin(name)
        sizes = wire.sizes(bounds, flat.dtype)
        mine = exact - flat[bounds[comm.rank] : bounds[comm.rank + 1]]
        self.codes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if mine.numel():
            self.codes[comm.rank] = wire.code.encode(mine, self.key, draw).to("cpu")
        comm.count_sent("all-gather", sizes[comm.rank] * (comm.world - 1))
        self.works = comm.pairs.swap(comm.pairs.tag(f"{name}/codes"), [self.codes[comm.rank]] * comm.world, self.codes)
        self.pending = Pending(comm, "all-gather", name)
        self.pending.tail.append(self._land)

    def _land(self) -> None:
        wait_all(self.works)
        for code, (low, high) in zip(self.codes, pairwise(self.bounds), strict=True):
            if high > low:
                there = self.flat[low:high]
                self.wire.code.add(code.to(there.device), there, self.key)


def clear_padding(flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> None:
    """Where no parameter is, a decoded sum may stand."""
    end = max(slot.start + slot.numel for slot in slots)
    flat[min(max(end, bounds[0]), bounds[-1]) : bounds[-1]].zero_()
