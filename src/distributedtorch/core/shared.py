"""Exchanges between ranks of one host through memory they share.

Each exchange has a line of words in every rank's segment, found by its logical name; a rank says there how far it is in
the n-th exchange of that name, and where its data lies. Data that lies in a segment is used where it is, everything
else is copied there first. Every sum is taken in rank order by the owner of its range, straight from the memory of all
ranks: bit-identical on all ranks and over runs, and the same bits as over gloo.

Said per exchange: BEGUN (the data lie there), SUMMED (this rank's range of the sum stands in its memory), READ (this
rank needs nothing of the others any more). An exchange ends when all ranks have read: from then on each may change its
memory. No thread is needed: a rank sums what is ready whenever it begins or waits for an exchange.

Memory moved by a rank, for a buffer of B bytes over N ranks: reduce-scatter reads B and writes B/N, all-gather copies
B(N-1)/N, all-reduce does both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core import segment
from distributedtorch.core.pool import Pool
from distributedtorch.core.segment import LINES, Board, Own, Segment

BEGUN, SUMMED, READ = 0, 1, 2
_NAME = 3
"""Which name a line of several names is used for."""
_OFFSETS = 2
"""Where data lies, in words of 8 bytes: for even and for odd counts."""
_EDITIONS = 7
"""How many of a piece's editions can be found: the latest ones."""
_CHUNK = 1 << 18
"""Elements that are summed at a time where there are more than two ranks: the running sum stays in the cache."""


class Shared:
    """What this rank shares with the others."""

    def __init__(self, rank: int, own: Own, segments: Sequence[Segment], board: Board, number: Callable[[str], int]):
        self.rank, self.world, self.own, self.segments, self.board = rank, len(segments), own, segments, board
        self.number = number
        """Gives a name the same number on all ranks."""
        self.others = [(rank + k) % self.world for k in range(1, self.world)]
        self._lines: dict[str, int] = {}
        self._counts: dict[int, int] = {}
        self._boxes: dict[int, list[Tensor]] = {}
        self._open: list[Transfer] = []
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.pool = Pool(own)
        board.meanwhile = self.poll

    def line(self, name: str) -> int | None:
        """The line of an exchange; None where there are more names than lines."""
        if name not in self._lines:
            self._lines[name] = 1 + self.number(name)
        line = self._lines[name]
        return line if line < LINES else None

    def begin(self, line: int, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool) -> Transfer:
        """Begin an exchange; `out` receives this rank's range of the sum, if there is one to take."""
        low, high = bounds[self.rank], bounds[self.rank + 1]
        given, first = (flat[low:high], low) if out is None else (flat[bounds[0] : bounds[-1]], bounds[0])
        outside = given.numel() > 0 and self.own.offset_of(flat) is None
        staged = self.pool.borrow(given.numel(), flat.dtype, shared=True).copy_(given) if outside else given
        transfer = Transfer(self, line, Job(flat, bounds, staged, first, out, gather, outside))
        self.poll()
        self._open.append(transfer)
        return transfer

    def poll(self) -> None:
        """Do what can be done without waiting."""
        for transfer in self._open:
            transfer.advance(wait=False)

    def say_begun(self, line: int, data: Tensor, check: int = 0) -> int:
        """This rank's data lies there: result, the count of the exchange."""
        count = self._counts[line] = (self._counts.get(line, 0) + 1) & 0xFFFFFFFF
        self.own.offsets[line * 8 + _OFFSETS + count % 2] = self.own.offset_of(data) or 0
        self.own.words[line * 16 + _NAME] = check
        self.board.put(line, BEGUN, count)
        return count

    def data(self, peer: int, line: int, count: int, span: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """What a rank has put there: `span`, the first element and how many."""
        offset = self.segments[peer].offsets[line * 8 + _OFFSETS + count % 2]
        return self.segments[peer].view(offset + span[0] * dtype.itemsize, span[1], dtype)

    def wait_all(self, line: int, word: int, count: int) -> None:
        """Wait until every other rank has said this much."""
        for peer in self.others:
            self.board.wait(peer, line, word, count)

    def exchange(self, line: int, mine: Tensor) -> Callable[[], Tensor]:
        """Every rank's `mine`, stacked, when the result is called. Two boxes take turns."""
        count = self._counts.get(line, 0)
        if line in self._counts:
            self.wait_all(line, BEGUN, count)  # who has begun the last one has read the one before
        flat = mine.view(-1).view(torch.uint8)
        boxes = self._boxes.setdefault(line, [])
        if not boxes or boxes[-1].numel() < flat.numel():
            room = max(64, 1 << (flat.numel() - 1).bit_length() if flat.numel() else 64)
            boxes += [self.own.zeros(room, torch.uint8), self.own.zeros(room, torch.uint8)]  # old ones may be read
        box = boxes[-1 - (count + 1) % 2]
        box[: flat.numel()].copy_(flat)
        count = self.say_begun(line, box)
        out = torch.empty((self.world, *mine.shape), dtype=mine.dtype)
        out[self.rank] = mine

        def finish() -> Tensor:
            for peer in self.others:
                self.board.wait(peer, line, BEGUN, count)
                if mine.numel():
                    out[peer].view(-1).copy_(self.data(peer, line, count, (0, mine.numel()), mine.dtype))
            return out

        return finish

    def broadcast(self, line: int, tensor: Tensor, root: int, check: int) -> bool:
        """Give all ranks `root`'s values. Result: whether they meant the same thing."""
        if self.rank == root:
            staged = tensor if self.own.offset_of(tensor) is not None else self.own.zeros(tensor.numel(), tensor.dtype)
            if staged is not tensor:
                staged.copy_(tensor.reshape(-1))
            count = self.say_begun(line, staged, check)
        else:
            count = self.say_begun(line, tensor, check)
            self.board.wait(root, line, BEGUN, count)
            if self.segments[root].words[line * 16 + _NAME] == check:
                tensor.view(-1).copy_(self.data(root, line, count, (0, tensor.numel()), tensor.dtype))
        same = True
        for peer in self.others:
            self.board.wait(peer, line, BEGUN, count)
            same = same and self.segments[peer].words[line * 16 + _NAME] == check
        self.board.put(line, READ, count)
        self.wait_all(line, READ, count)
        return same

    def offer(self, number: int, edition: int, piece: Tensor) -> None:
        """Say where this rank's piece of something lies, in this edition."""
        if number >= LINES:
            return
        line = LINES + number
        self.own.offsets[line * 8 + 1 + edition % _EDITIONS] = self.own.offset_of(piece) or 0
        self.board.put(line, 0, edition + 1)

    def piece(self, peer: int, number: int, edition: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A rank's piece in an edition, when it has come there; None where it is too far ahead to tell."""
        if number >= LINES:
            return None
        line, there = LINES + number, self.segments[peer]
        self.board.wait(peer, line, 0, edition + 1)
        offset = there.offsets[line * 8 + 1 + edition % _EDITIONS]
        if there.words[line * 16] - 1 - edition >= _EDITIONS or not offset:
            return None
        return there.view(offset, numel, dtype)

    def sum_range(self, parts: list[Tensor], out: Tensor) -> None:
        """The sum in rank order; `out` may be one of the parts."""
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=out)
            return
        scratch = self._scratch.setdefault(out.dtype, torch.empty(_CHUNK, dtype=out.dtype))
        for at in range(0, out.numel(), _CHUNK):
            pieces = [part[at : at + _CHUNK] for part in parts]
            total = torch.add(pieces[0], pieces[1], out=scratch[: pieces[0].numel()])
            for piece in pieces[2:-1]:
                total.add_(piece)
            torch.add(total, pieces[-1], out=out[at : at + _CHUNK])

    def ended(self, transfer: Transfer) -> None:
        """It needs no more attention."""
        self._open.remove(transfer)


@dataclass
class Job:
    """What is exchanged."""

    flat: Tensor
    """Where the result goes."""
    bounds: Sequence[int]
    """Rank k owns elements bounds[k] to bounds[k + 1]."""
    staged: Tensor
    """This rank's values in its segment: of all ranges where they are summed, else of its own."""
    first: int
    """The element of `flat` that `staged` begins with."""
    out: Tensor | None
    """Where this rank's range of the sum goes; None: nothing is summed."""
    gather: bool
    """Whether every rank gets all ranges."""
    outside: bool
    """Whether `flat` lies outside the segment, so that `staged` was borrowed."""


class Transfer:
    """One exchange under way."""

    def __init__(self, shared: Shared, line: int, job: Job) -> None:
        self.shared, self.line, self.job = shared, line, job
        self.low, self.high = job.bounds[shared.rank], job.bounds[shared.rank + 1]
        self.advanced = False
        self.count = shared.say_begun(line, job.staged)

    def advance(self, *, wait: bool) -> bool:
        """Take this rank's range of the sum, or the others' ranges where nothing is summed. Result: whether done."""
        shared, board = self.shared, self.shared.board
        if wait:
            shared.wait_all(self.line, BEGUN, self.count)  # which may do it meanwhile
        if self.advanced:
            return True
        if not all(board.reached(k, self.line, BEGUN, self.count) for k in shared.others):
            return False
        self.advanced = True
        if self.job.out is None:
            self._spread(BEGUN)
        else:
            self._sum(self.job.out)
            board.put(self.line, SUMMED if self.job.gather else READ, self.count)
        return True

    def ends(self) -> bool:
        """Whether `finish` would not wait; not where ranges are still to be copied."""
        read = (self.shared.board.reached(k, self.line, READ, self.count) for k in self.shared.others)
        return self.advance(wait=False) and all(read)

    def _sum(self, out: Tensor) -> None:
        shared, job = self.shared, self.job
        span = self.low - job.first, self.high - self.low
        if span[1]:
            mine = job.staged[span[0] : span[0] + span[1]]
            parts = [
                mine if k == shared.rank else shared.data(k, self.line, self.count, span, mine.dtype)
                for k in range(shared.world)
            ]
            shared.sum_range(parts, mine if job.gather else out)

    def _spread(self, word: int) -> None:
        """Copy the others' ranges as they come."""
        shared, job = self.shared, self.job
        for k in shared.others:
            low, high = job.bounds[k], job.bounds[k + 1]
            shared.board.wait(k, self.line, word, self.count)
            if high > low:
                span = (0 if job.out is None else low - job.first), high - low
                job.flat[low:high].copy_(shared.data(k, self.line, self.count, span, job.flat.dtype))
        shared.board.put(self.line, READ, self.count)

    def finish(self) -> None:
        """Return when the result is in place and nobody reads this rank's memory any more."""
        job = self.job
        self.advance(wait=True)
        if job.out is not None and job.gather:
            if job.outside:
                job.out.copy_(job.staged[self.low - job.first : self.high - job.first])
            self._spread(SUMMED)
        self.shared.wait_all(self.line, READ, self.count)
        self.shared.ended(self)
        if job.outside:
            self.shared.pool.give_back([job.staged])


def share(rank: int, world: int, store: Store, say: Callable[[str], None]) -> tuple[Shared | None, str]:
    """Share memory with all other ranks, if all can: a group call. Result: that, or nothing and the reason."""
    own, card = segment.make()
    cards = _all(rank, world, store, "card", card)
    hosts = {card.get("host") for card in cards}
    reason = next((card["reason"] for card in cards if "reason" in card), "")
    if not reason and len(hosts) > 1:
        reason = "the ranks are on several hosts"
    if not reason and world > segment.MOST_RANKS:
        reason = f"more than {segment.MOST_RANKS} ranks on one host"
    segments: list[Segment] = []
    if not reason:
        assert own is not None
        try:
            segments = segment.open_all(rank, own, cards)
            board = Board(rank, segments, [card["pid"] for card in cards], say)
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        verdicts = _all(rank, world, store, "opened", {"reason": reason})
        reason = next((verdict["reason"] for verdict in verdicts if verdict["reason"]), "")
    if own is not None:
        os.close(own.fd)
    if reason:
        return None, reason
    assert own is not None
    return Shared(rank, own, segments, board, lambda name: _number(store, name)), ""


def _all(rank: int, world: int, store: Store, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    store.set(f"shared/{what}/{rank}", json.dumps(mine))
    return [json.loads(store.get(f"shared/{what}/{k}")) for k in range(world)]


def _number(store: Store, name: str) -> int:
    """The same number on all ranks: the first to ask for one gives it."""
    if store.add(f"shared/asked/{name}", 1) == 1:
        store.set(f"shared/name/{name}", str(store.add("shared/names", 1)))
    return int(store.get(f"shared/name/{name}"))
