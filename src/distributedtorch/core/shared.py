"""Exchanges between ranks of one host through memory they share.

Each exchange has a line of words in every rank's segment, found by its logical name; a rank says there how far it is in
the n-th exchange of that name, and where its data lies. Data that lies in a segment is used where it is, everything
else is copied there first. Every sum is taken in rank order by the owner of its range, straight from the memory of all
ranks: bit-identical on all ranks and over runs, and the same bits as over gloo.

Said per exchange: BEGUN (the data lie there), SUMMED (this rank's range of the sum stands in its memory), READ (this
rank needs nothing of the others any more). An exchange ends when all ranks have read: from then on each may change its
memory. No thread is needed: a rank sums what is ready whenever it begins or waits for an exchange. Small ones are
copied to a box first, so that BEGUN is all that need be said.

Memory moved by a rank, for a buffer of B bytes over N ranks: reduce-scatter reads B and writes B/N, all-gather copies
B(N-1)/N, all-reduce does both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core import segment
from distributedtorch.core.errors import shown
from distributedtorch.core.plain import heard
from distributedtorch.core.pool import Pool
from distributedtorch.core.segment import LINES, Board, Own, Segment
from distributedtorch.core.transfer import BEGUN, READ, Brief, Job, Transfer

EACH_ITS_OWN = "every rank is on a host of its own"
_NAME = 3
"""Which name a line of several names is used for."""
_OFFSETS = 2
"""Where data lies, in words of 8 bytes: for even and for odd counts."""
_EDITIONS = 7
"""How many of a piece's editions can be found: the latest ones."""
_BRIEF = 1 << 16
"""Bytes up to which everything is copied and summed by every rank: one meeting rather than three."""
_CHUNK = 1 << 18
"""Elements that are summed at a time where there are more than two ranks: the running sum stays in the cache."""


class UnderWay(Protocol):
    """An exchange that needs something of this rank from time to time."""

    def advance(self, *, wait: bool) -> bool: ...


class Shared:
    """What this rank shares with the others of its host; ranks are counted among these."""

    def __init__(self, rank: int, own: Own, segments: Sequence[Segment], board: Board, number: Callable[[str], int]):
        self.rank, self.world, self.own, self.segments, self.board = rank, len(segments), own, segments, board
        self.number = number
        """Gives a name the same number on all ranks."""
        self.others = [(rank + k) % self.world for k in range(1, self.world)]
        self._lines: dict[str, int] = {}
        self._counts: dict[int, int] = {}
        self._boxes: dict[int, list[Tensor]] = {}
        self._open: list[UnderWay] = []
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.pool = Pool(own)
        self.kept: list[Tensor] = []
        """Blocks that must not come free while others may look at them."""
        board.meanwhile = self.poll

    def part(self, places: Sequence[int], label: str) -> Shared:
        """The same between some of the ranks; `label` tells its exchanges from those of all."""
        segments = [self.segments[k] for k in places]
        part = Shared(
            places.index(self.rank), self.own, segments, self.board.part(places), lambda n: self.number(f"{label}/{n}")
        )
        part._open, part.pool = self._open, self.pool  # whoever waits does what is under way anywhere
        return part

    def line(self, name: str) -> int | None:
        """The line of an exchange; None where there are more names than lines."""
        if name not in self._lines:
            self._lines[name] = 1 + self.number(name)
        line = self._lines[name]
        return line if line < LINES else None

    def begin(self, line: int, job: Job) -> Transfer | Brief:
        """Begin an exchange."""
        if (job.bounds[-1] - job.bounds[0]) * job.flat.element_size() <= _BRIEF:
            return Brief(self, line, job)
        transfer = Transfer(self, line, job)
        self.opened(transfer)
        return transfer

    def opened(self, transfer: UnderWay) -> None:
        """It is to be advanced whenever this rank begins or waits for anything."""
        self.poll()
        self._open.append(transfer)

    def poll(self) -> None:
        """Do what can be done without waiting."""
        for transfer in self._open:
            transfer.advance(wait=False)

    @property
    def busy(self) -> bool:
        """Whether exchanges are under way that may need something of this rank."""
        return bool(self._open)

    def next(self, line: int) -> int:
        """The count of a line's next exchange."""
        count = self._counts[line] = (self._counts.get(line, 0) + 1) & 0xFFFFFFFF
        return count

    def say_begun(self, line: int, data: Tensor, check: int = 0) -> int:
        """This rank's data lies there: result, the count of the exchange."""
        count = self.next(line)
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

    def put(self, line: int, values: Tensor) -> int:
        """Say that these (dense) values are this rank's: two boxes take turns. Result: the count of the exchange."""
        last = self._counts.get(line, 0)
        if last:
            self.wait_all(line, BEGUN, last)  # who has begun the last one has read the one before
        size, boxes = values.numel() * values.element_size(), self._boxes.setdefault(line, [])
        if not boxes or boxes[-1].numel() < size:
            room = max(64, 1 << (size - 1).bit_length() if size else 64)
            boxes += [self.own.zeros(room, torch.uint8), self.own.zeros(room, torch.uint8)]  # old ones may be read
        box = boxes[-1 - (last + 1) % 2]
        if size:
            box[:size].view(values.dtype).copy_(values.view(-1))
        return self.say_begun(line, box)

    def exchange(self, line: int, mine: Tensor) -> Callable[[], Tensor]:
        """Every rank's `mine`, stacked, when the result is called."""
        count = self.put(line, mine)
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

    def has_piece(self, peer: int | None, number: int, edition: int) -> bool:
        """Whether a rank has come to an edition of a piece, so that `piece` would not wait."""
        return peer is not None and number < LINES and self.board.reached(peer, LINES + number, 0, edition + 1)

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

    def ended(self, transfer: UnderWay) -> None:
        """It needs no more attention."""
        self._open.remove(transfer)


def share(
    rank: int, world: int, store: Store, say: Callable[[str], None]
) -> tuple[Shared | None, list[list[int]], str]:
    """Share memory with all other ranks of this host, if all ranks can with theirs: a group call.

    Result: that and the ranks of each host, or nothing and the reason.
    """
    own, card = segment.make()
    cards = _all(rank, world, store, "card", card)
    reason = next((card["reason"] for card in cards if "reason" in card), "")
    hosts: dict[str, list[int]] = {}
    for k, one in enumerate(cards):
        hosts.setdefault(one.get("host", ""), []).append(k)
    if not reason and len(hosts) == world > 1:
        reason = EACH_ITS_OWN
    if not reason and max(map(len, hosts.values())) > segment.MOST_RANKS:
        reason = f"more than {segment.MOST_RANKS} ranks on one host"
    near = next(ranks for ranks in hosts.values() if rank in ranks)
    segments: list[Segment] = []
    if not reason:
        assert own is not None
        there = [cards[k] for k in near]
        try:
            segments = segment.open_all(near.index(rank), own, there)
            board = Board(near.index(rank), segments, [card["pid"] for card in there], say, near)
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        verdicts = _all(rank, world, store, "opened", {"reason": reason})
        reason = next((verdict["reason"] for verdict in verdicts if verdict["reason"]), "")
    made: list[Segment] = segments or ([own] if own is not None else [])
    for used in made if reason else made[1:]:
        used.close()  # private views are made of the first rank's only
    if reason:
        return None, [], shown(reason)
    assert own is not None
    shared = Shared(near.index(rank), own, segments, board, lambda name: _number(store, name))
    return shared, list(hosts.values()), ""


def _all(rank: int, world: int, store: Store, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    store.set(f"shared/{what}/{rank}", json.dumps(mine))
    return [heard(store.get(f"shared/{what}/{k}")) for k in range(world)]


def _number(store: Store, name: str) -> int:
    """The same number on all ranks: the first to ask for one gives it."""
    if store.add(f"shared/asked/{name}", 1) == 1:
        store.set(f"shared/name/{name}", str(store.add("shared/names", 1)))
    return int(store.get(f"shared/name/{name}"))
