"""Pieces fetched from their owners when they are needed, without the owners' training threads.

Each rank offers pieces under numbers that are the same everywhere; a thread of its own answers requests. So a block
that only some ranks run, or a weight that only rank 0 prints, needs nothing from the others: they may be anywhere.

A piece has an edition, raised whenever its values change. A request names the edition its rank is at; an owner that is
behind answers when it has come there, one that is ahead gives the values of that edition. A rank that is done says so
to all, and answers until all have.

Where ranks share memory, or can read each other's GPU memory (`reach`), a piece is copied from where its owner keeps
it: nobody is asked.

Bytes sent per fetch of B bytes divided over N ranks: each owner sends its piece, together B(N-1)/N, and a request of 32
bytes goes to each.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distributedtorch.core import reach
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.listeners import sealed
from distributedtorch.core.pairs import peer_errors

_ASK = 0
"""Tag of requests; answers carry a tag the requester chose."""
_TAGS = 1 << 30
_DONE, _STUCK = -1, -2
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_BE_SURE = 0.1, 1.0
_AT_ONCE = 8
_IDLE_FOR_EVER = timedelta(days=3650)
"""A rank may go for hours without asking; gloo closes a connection whose receive has run out of time."""
_FORKED = explain(
    "a process forked from a rank (a data worker, multiprocessing) uses parameters that are divided over ranks (zero3)",
    "a copy of the model: only the rank itself can ask the other ranks for the rest",
    "give the process copy.deepcopy(model) or model.state_dict(), made before it starts",
)


class Fetch:
    """Pieces on their way into `flat`."""

    def __init__(self, comm: Comm, land: Callable[[], None]) -> None:
        self.comm, self.land = comm, land

    def wait(self) -> None:
        """Hold the calling thread until all pieces are in place."""
        with self.comm.timed("gather"):
            self.land()


class Pull:
    """What this rank offers to the others and fetches from them."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        with sealed():
            self.group = dist.new_group(backend="gloo", timeout=_IDLE_FOR_EVER)
        self.pieces: list[Tensor] = []
        self.editions: list[int] = []
        self.reach: reach.Reach | None = None
        """The others' GPU memory, where pieces lie on GPUs and it can be read."""
        self.unreached: str | None = None
        """Why not."""
        self._blank: set[int] = set()
        self._old: dict[tuple[int, int], Tensor] = {}
        self._late: list[tuple[int, int, int, int]] = []
        self._serial = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asks: deque[tuple[dist.Work, Tensor]] = deque()
        self._answers: deque[tuple[dist.Work, Tensor]] = deque()
        self._thread = threading.Thread(target=self._answer_all, name="distributedtorch-pieces", daemon=True)
        self._thread.start()

    def offer(self, piece: Tensor, *, blank: bool = False) -> int:
        """Offer this rank's piece of something; all ranks offer in the same order. Returns its number.

        `blank`: it has no values yet on any rank, so that nobody asks before it has.
        """
        if piece.is_cuda and self.unreached is None:
            self.reach, self.unreached = reach.make(self.comm, piece.device)
        with self._lock:
            self.pieces.append(piece)
            self.editions.append(0)
            if blank:
                self._blank.add(len(self.pieces) - 1)
        self._offered(len(self.pieces) - 1)
        return len(self.pieces) - 1

    def is_blank(self, number: int) -> bool:
        """Whether a piece has had no values so far, so that there is nothing to fetch."""
        return number in self._blank and self.editions[number] == 0

    def withdraw(self, number: int) -> None:
        """Offer a piece no more; no rank may ask for it any more."""
        self.pieces[number] = self.pieces[number].new_empty(0)
        if self.reach is not None:
            self.reach.forget(number)

    def changed(self, number: int) -> None:
        """This rank's piece has its next values, after a fence."""
        with self._lock:
            self.editions[number] += 1
        self._offered(number)

    def replace(self, number: int, values: Tensor) -> Tensor:
        """Offer other values; ranks that have not come so far still get the earlier ones. Result: this rank's piece."""
        with self._lock:
            piece = self.pieces[number]
            if self.is_blank(number):
                piece.copy_(values)
            elif piece.device.type == "cpu" or self.reach is not None:  # may be on its way just now
                self._old[number, self.editions[number]] = piece
                self.pieces[number] = self.comm.pool.zeros(piece.numel(), piece.dtype, piece.device).copy_(values)
            else:
                self._old[number, self.editions[number]] = piece.to("cpu")
                piece.copy_(values)
            self.editions[number] += 1
        self._offered(number)
        return self.pieces[number]

    def _offered(self, number: int) -> None:
        """Others can have a piece in a new edition."""
        piece, shared = self.pieces[number], self.comm.shared
        if shared is not None and piece.device.type == "cpu":
            shared.offer(number, self.editions[number], piece)
        elif shared is not None and self.reach is not None and piece.numel():
            shared.offer(number, self.editions[number], self.reach.card(number, piece))
        self._answer_late()

    def fence(self, name: str) -> list[list[int]]:
        """Return when every rank has come here, having let go of all it fetched: each rank's editions, to compare."""
        if self.reach is not None:
            self.reach.done_reading()
        everywhere: list[list[int]] = self.comm.exchange(name, torch.tensor(self.editions)).tolist()
        if self.reach is not None:
            self.reach.may_write()
        with self._lock:
            sent = list(self._answers)
            self._answers.clear()
            self._old.clear()
        for work, _ in sent:
            work.wait()
        return everywhere

    def fetch(self, number: int, flat: Tensor, bounds: Sequence[int]) -> Fetch:
        """Begin to bring the other ranks' pieces into `flat`, at `bounds`.

        Raises:
            UsageError: This is a process that was forked from the rank: it is no member of the group.
        """
        if os.getpid() != self._pid:
            raise UsageError(_FORKED)
        others = [(self.comm.rank + k) % self.comm.world for k in range(1, self.comm.world)]
        others = [peer for peer in others if bounds[peer + 1] > bounds[peer]]
        edition = self.editions[number]
        direct = flat.device.type == "cpu" or (flat.is_cuda and self.reach is not None)
        near = [peer for peer in others if direct and self.comm.place(peer) is not None]
        far = [peer for peer in others if peer not in near]
        land = self._request(number, edition, flat, bounds, far) if far else None
        ahead = self._copy_ahead(near, number, edition, flat, bounds) if flat.is_cuda and near else None

        def finish() -> None:
            if ahead is not None:
                ahead()
            for peer in near if ahead is None else ():
                self._copy(peer, number, edition, flat, bounds)
            if land is not None:
                land()

        return Fetch(self.comm, finish)

    def _copy_ahead(
        self, near: list[int], number: int, edition: int, flat: Tensor, bounds: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to copy what GPUs of this host have by now; the result orders this stream after all of it."""
        assert self.reach is not None and self.comm.shared is not None
        side, shared = self.reach.stream, self.comm.shared
        side.wait_stream(torch.cuda.current_stream())  # `flat` may have been something else until now
        there = [peer for peer in near if shared.has_piece(self.comm.place(peer), number, edition)]
        for peer in there:
            self._copy(peer, number, edition, flat, bounds)
        begun = side.record_event()

        def finish() -> None:
            late = [peer for peer in near if peer not in there]
            for peer in late:
                self._copy(peer, number, edition, flat, bounds)
            torch.cuda.current_stream().wait_event(side.record_event() if late else begun)

        return finish

    def _copy(self, peer: int, number: int, edition: int, flat: Tensor, bounds: Sequence[int]) -> None:
        """Take a piece from where it lies in shared memory."""
        place, there = self.comm.place(peer), flat[bounds[peer] : bounds[peer + 1]]
        assert self.comm.shared is not None and place is not None
        shape = (reach.CARD_BYTES, torch.uint8) if there.is_cuda else (there.numel(), there.dtype)
        piece = self.comm.shared.piece(place, number, edition, *shape)
        if piece is None:
            self._request(number, edition, flat, bounds, [peer])()
            return
        if there.is_cuda:
            assert self.reach is not None
            self.reach.copy(peer, bytes(piece.tolist()), there)
        else:
            there.copy_(piece)
        self.comm.count_sent("gather", there.numel() * there.element_size())

    def _request(
        self, number: int, edition: int, flat: Tensor, bounds: Sequence[int], others: list[int]
    ) -> Callable[[], None]:
        """Ask for pieces; the result returns when they have come."""
        host = flat if flat.device.type == "cpu" else torch.empty(flat.shape, dtype=flat.dtype)
        works: list[tuple[dist.Work, int]] = []
        for peer in others:
            self._serial += 1
            tag = 1 + self._serial % (_TAGS - 1)
            with peer_errors(peer):
                work = dist.irecv(host[bounds[peer] : bounds[peer + 1]], peer, group=self.group, tag=tag)
                assert work is not None
                works.append((work, peer))
                self._ask(peer, [number, tag, edition])

        def land() -> None:
            for work, peer in works:
                with peer_errors(peer):
                    work.wait()
            for peer in others if host is not flat else ():
                low, high = bounds[peer], bounds[peer + 1]
                flat[low:high].copy_(host[low:high])

        return land

    def close(self) -> None:
        """Say that this rank asks no more, and answer until all ranks have said so, or one waits for it in vain."""
        if self.reach is not None:
            self.reach.close()
        for peer in range(self.comm.world):
            if peer != self.comm.rank:
                self._ask(peer, [_DONE, self.comm.count, 0])
        self._thread.join()

    def _ask(self, peer: int, request: list[int]) -> None:
        message = torch.tensor(request)
        self._keep(self._asks, dist.isend(message, peer, group=self.group, tag=_ASK), message)

    def _answer_all(self) -> None:
        """The thread: answer requests until every other rank is done, or is gone (others say why)."""
        left, request = self.comm.world - 1, torch.zeros(3, dtype=torch.int64)
        try:
            while left:
                peer = dist.recv(request, group=self.group, tag=_ASK)
                number, tag, edition = request.tolist()
                if number == _STUCK:
                    return
                if number == _DONE:
                    left -= 1
                    threading.Thread(target=self._mind, args=(peer, tag), daemon=True).start()
                else:
                    with self._lock:
                        self._late.append((peer, number, tag, edition))
                    self._answer_late()
        except RuntimeError:
            return

    def _mind(self, peer: int, count: int) -> None:
        """A rank has left after `count` exchanges. Where this one waits in a later one, let it go and be named."""
        while True:
            waiting = self.comm.waiting
            if waiting and self.comm.count > count and time.monotonic() - waiting[1] > _SECONDS_TO_BE_SURE:
                return self._ask(peer, [_STUCK, 0, 0])
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _answer_late(self) -> None:
        """Answer every request whose piece is here in the edition asked for."""
        with self._lock:
            due = [r for r in self._late if r[1] < len(self.pieces) and r[3] <= self.editions[r[1]]]
            self._late = [request for request in self._late if request not in due]
            pieces = [self._old.get((number, edition), self.pieces[number]) for _, number, _, edition in due]
            hosts = [piece.detach().to("cpu") for piece in pieces]
        for (peer, _, tag, _), host in zip(due, hosts, strict=True):
            self.comm.count_sent("gather", host.numel() * host.element_size())
            self._keep(self._answers, dist.isend(host, peer, group=self.group, tag=tag), host)

    def _keep(self, sends: deque[tuple[dist.Work, Tensor]], work: dist.Work | None, memory: Tensor) -> None:
        """Hold on to what is being sent; wait for the oldest where they are many.

        That always ends: who asks is ready to receive before, and a thread that answers waits for answers only.
        """
        assert work is not None
        with self._lock:
            sends.append((work, memory))
            old = sends.popleft() if len(sends) > _AT_ONCE else None
        if old is not None:
            old[0].wait()
