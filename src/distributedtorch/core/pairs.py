"""Exchanges of tensors in host memory made of direct sends and receives between pairs of ranks, over gloo.

Each is posted under a tag made of the exchange's logical name and its count. So a rank that is in another exchange can
never be taken for a partner: both wait, and the watch names them. The sum is taken in rank order on the owner of each
range: bit-identical on all ranks and over runs, and the same bits under every plan.

Bytes sent by a rank, for a buffer of B bytes over N ranks: reduce-scatter B(N-1)/N, all-gather B(N-1)/N, all-reduce
2B(N-1)/N. (gloo's own reduce-scatter sends as much as its all-reduce.)
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distributedtorch.core.errors import PeerError
from distributedtorch.core.pool import Pool

_CHANNEL_BITS, _COUNT_BITS = 19, 10
RELAYED = 1 << _CHANNEL_BITS + _COUNT_BITS
"""In a tag: the channel is the line of the exchange, not made of its name."""
RESULT = RELAYED << 1
"""In a tag: the second half of an all-reduce."""


class Posted:
    """One exchange under way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.last: Callable[[], None] = lambda: None

    def advance(self, *, wait: bool) -> None:
        """Nothing to do: a thread does this rank's part."""

    def ends(self) -> bool:
        """Whether `finish` would hardly wait."""
        return self.done.is_set()

    def finish(self) -> None:
        """Return when the result is in place."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.last()


class Beside:
    """Threads for what can only be waited for: each thing has one to itself, so that none waits behind another."""

    def __init__(self, name: str) -> None:
        self.name = f"distributedtorch-{name}"
        self._jobs: queue.SimpleQueue[tuple[Posted, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def hand_over(self, posted: Posted, finish: Callable[[], None]) -> None:
        """Do this, and say so to `posted`."""
        if not self._idle.acquire(blocking=False):
            self._threads.append(threading.Thread(target=self._run, name=self.name, daemon=True))
            self._threads[-1].start()
        self._jobs.put((posted, finish))

    def close(self) -> None:
        """End the threads; they may be held by a rank that is gone, so not for ever."""
        until = time.monotonic() + 1.0
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            posted, run = job
            try:
                run()
            except BaseException as error:
                posted.error = error
            done = posted.done
            del job, posted, run  # before anyone goes on: gloo's handles must not be freed while Python ends
            self._idle.release()
            done.set()


class Pairs:
    """This rank's sends and receives."""

    def __init__(self, rank: int, world: int, pool: Pool) -> None:
        self.rank, self.world, self.pool = rank, world, pool
        self.members: Sequence[int] = range(world)
        """Their ranks in the job."""
        self.label = ""
        self._counts: dict[str, int] = defaultdict(int)
        self._channels: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self.progress = Beside("exchange")

    def part(self, members: Sequence[int], label: str) -> Pairs:
        """The same between some of the ranks; `label` tells its exchanges from those of all."""
        part = copy.copy(self)  # names and counts are kept together: each has a channel of its own
        part.rank, part.world = members.index(self.members[self.rank]), len(members)
        part.members, part.label = members, f"{label}/"
        return part

    def begin(self, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool) -> Posted:
        """Post what can be posted now; a thread sums and posts the rest."""
        posted, tag = Posted(), self.tag(name)
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        own = mine.stop - mine.start
        if out is None:
            works = self._gather_posts(flat, bounds, tag)
            self.progress.hand_over(posted, lambda: wait_all(works))
            return posted
        parts = {k: self.pool.borrow(own, flat.dtype) for k in self._others()} if own else {}
        received = list(parts.values())
        receives = [self._post(dist.irecv, part, k, tag) for k, part in parts.items()]
        theirs = [(flat[bounds[k] : bounds[k + 1]], k) for k in self._others() if bounds[k + 1] > bounds[k]]
        sends = [self._post(dist.isend, piece, k, tag) for piece, k in theirs]
        # A rank sends its sum when all parts of it have come, so the sum may be received over what was sent.
        sums = [self._post(dist.irecv, piece, k, tag | RESULT) for piece, k in theirs] if gather else []

        def finish() -> None:
            wait_all(receives)
            if own:
                parts[self.rank] = flat[mine]
                sum_in_order([parts[k] for k in range(self.world)], out)
                self.pool.give_back(received)
                if gather:
                    sends.extend(self._post(dist.isend, flat[mine], k, tag | RESULT) for k in self._others())
            wait_all(sums)
            posted.last = lambda: wait_all(sends)

        self.progress.hand_over(posted, finish)
        return posted

    def exchange(self, name: str, mine: Tensor) -> Callable[[], Tensor]:
        """Every rank's `mine`, stacked, when the result is called."""
        out = torch.empty((self.world, *mine.shape), dtype=mine.dtype)
        out[self.rank] = mine
        bounds = [mine.numel() * k for k in range(self.world + 1)]
        works = self._gather_posts(out.view(-1), bounds, self.tag(name))

        def finish() -> Tensor:
            wait_all(works)
            return out

        return finish

    def swap(self, tag: int, out: Sequence[Tensor], into: Sequence[Tensor]) -> Works:
        """Give each other rank its `out` and fill each `into`; what is empty does not travel."""
        receives = [self._post(dist.irecv, into[k], k, tag) for k in self._others() if into[k].numel()]
        return receives + [self._post(dist.isend, out[k], k, tag) for k in self._others() if out[k].numel()]

    def broadcast(self, name: str, host: Tensor, root: int) -> None:
        """Give every rank `root`'s values."""
        tag = self.tag(name)
        if self.rank == root:
            wait_all([self._post(dist.isend, host, k, tag) for k in self._others()])
        else:
            wait_all([self._post(dist.irecv, host, root, tag)])

    def close(self) -> None:
        """End the threads."""
        self.progress.close()

    def _gather_posts(self, flat: Tensor, bounds: Sequence[int], tag: int) -> Works:
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
        theirs = [(flat[bounds[k] : bounds[k + 1]], k) for k in self._others() if bounds[k + 1] > bounds[k]]
        receives = [self._post(dist.irecv, piece, k, tag) for piece, k in theirs]
        return receives + ([self._post(dist.isend, mine, k, tag) for k in self._others()] if mine.numel() else [])

    def _post(self, call: Callable[..., dist.Work | None], tensor: Tensor, k: int, tag: int) -> _Work:
        return post(call, tensor, self.members[k], tag)

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning after itself so that not all talk to one."""
        return [(self.rank + k) % self.world for k in range(1, self.world)]

    def tag(self, name: str, count: int | None = None) -> int:
        """What marks the messages of the next exchange of that name; asked for by the training thread, in order.

        `count` tells exchanges of one name apart where not all ranks take part in each.
        """
        name = self.label + name
        self._counts[name] += 1
        number = self._counts[name] if count is None else count
        return self._channel(name) << _COUNT_BITS | number % (1 << _COUNT_BITS)

    def meet(self, name: str) -> None:
        """An exchange of this name will come, on the ranks at different moments: settle its channel now."""
        self._channel(self.label + name)

    def _channel(self, name: str) -> int:
        if name not in self._channels:
            channel = zlib.crc32(name.encode()) % (1 << _CHANNEL_BITS)
            while self._names.setdefault(channel, name) != name:  # the same way on all ranks, which meet names in order
                channel = (channel + 1) % (1 << _CHANNEL_BITS)
            self._channels[name] = channel
        return self._channels[name]


def relayed_tag(line: int, count: int) -> int:
    """What marks the messages of the n-th exchange on a line of shared memory: no other has it."""
    return RELAYED | line << _COUNT_BITS | count & ((1 << _COUNT_BITS) - 1)


_Work = tuple["dist.Work | None", int]
Works = list[_Work]


def wait_all(works: Works) -> None:
    """Wait for sends and receives, each with the rank it is about."""
    for work, peer in works:
        with peer_errors(peer):
            if work is not None:
                work.wait()


@contextlib.contextmanager
def peer_errors(peer: int) -> Iterator[None]:
    """A block in which an error of the connection means that `peer` is gone."""
    try:
        yield
    except RuntimeError as error:
        raise _gone(peer, error) from None


def post(call: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int) -> _Work:
    """Begin a send or a receive."""
    with peer_errors(peer):
        return call(tensor, peer, tag=tag), peer


def _gone(peer: int, error: RuntimeError) -> PeerError:
    said = str(error).splitlines()[0]
    said = said.split("] ", 1)[-1].split(". This is typically")[0]
    lost = PeerError(f"rank {peer} is gone or out of reach ({said})")
    lost.rank = peer
    return lost


def sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    """The sum, from the first to the last; the first may be overwritten."""
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    torch.add(total, parts[-1], out=out)
