"""Exchanges between ranks of several hosts: through shared memory inside each, over gloo across.

Of every host one rank relays what another host's rank owns: the one with the same number among the host's ranks. To
sum, each host first sums by itself, in rank order, through shared memory; its relays send these sums to the owners,
which add them in the order of the hosts. To gather, owners send their ranges to their relays, from which the other
ranks of the host copy them. The order is fixed by where the ranks are: bit-identical on all ranks and over runs.

Bytes that go from one host to the others, for a buffer of B bytes over H hosts: reduce-scatter B(H-1)/H, all-gather
B(H-1)/H for equal hosts, however many ranks each has. In pairs of ranks it would be as many times that as a host has
ranks.

gloo's sends and receives can only be waited for, so each exchange has a thread of its own for that: exchanges that the
ranks begin, or wait for, in different orders come to an end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distributedtorch.core.errors import PeerError
from distributedtorch.core.pairs import RESULT, Beside, Posted, Works, post, relayed_tag, sum_in_order, wait_all
from distributedtorch.core.shared import Shared
from distributedtorch.core.transfer import BEGUN, READ, SUMMED, Job

_SECONDS_BETWEEN_LOOKS = 0.001


class Hosts:
    """What this rank shares with those of its host, and sends to others."""

    def __init__(self, rank: int, groups: Sequence[Sequence[int]], shared: Shared) -> None:
        self.rank, self.groups, self.shared = rank, groups, shared
        self.here = next(k for k, group in enumerate(groups) if rank in group)
        self.near = list(groups[self.here])
        """The ranks of this host."""
        self.relays = [[group[self._place(r) % len(group)] for group in groups] for r in range(sum(map(len, groups)))]
        """For each rank, who stands for it on each host."""
        relayed = {peer: [r for r, relay in enumerate(self.relays) if relay[self.here] == peer] for peer in self.near}
        self.ranges = relayed
        """For each rank of this host, those it stands for, itself among them."""
        self.far = [k for k in range(len(groups)) if k != self.here]
        self.beside = Beside("across")

    def _place(self, rank: int) -> int:
        return next(group.index(rank) for group in self.groups if rank in group)

    def given(self, bounds: Sequence[int], *, reduce: bool, gather: bool) -> int:
        """Elements that this rank gives to others, of its host and across."""
        own = bounds[self.rank + 1] - bounds[self.rank]
        mine = sum(bounds[r + 1] - bounds[r] for r in self.ranges[self.rank])
        inside = (bounds[-1] - bounds[0] - mine) * reduce + mine * (len(self.near) - 1) * gather
        return inside + (mine - own) * reduce + own * len(self.far) * gather

    def begin(self, line: int, job: Job) -> Relayed:
        """Begin an exchange."""
        relayed = Relayed(self, line, job)
        self.shared.opened(relayed)
        return relayed

    def waited(self, wait: Callable[[], Any]) -> Any:
        """The result of a wait over gloo; meanwhile this rank does its part of what is under way on its host."""
        if not self.shared.busy:
            with self.blaming():
                return wait()
        posted, found = Posted(), []
        self.beside.hand_over(posted, lambda: found.append(wait()))
        self.attend(posted)
        return found[0]

    def attend(self, posted: Posted) -> None:
        """Return when a thread is done with something, or raise what went wrong."""
        while not posted.done.wait(_SECONDS_BETWEEN_LOOKS):
            self.shared.poll()
        with self.blaming():
            posted.finish()

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """A block that may find a rank of another host gone: others of this host will ask who was first."""
        try:
            yield
        except PeerError as error:
            if error.rank is not None:
                self.shared.board.blame(error.rank)
            raise

    def spread(self, line: int, flat: Tensor, bounds: Sequence[int]) -> Works:
        """Begin to bring every rank's range of `flat`, which exists once per host, to the other hosts."""
        count = self.shared.next(line)
        mine = [r for r in self.ranges[self.rank] if r != self.rank and bounds[r + 1] > bounds[r]]
        tag, own = relayed_tag(line, count), flat[bounds[self.rank] : bounds[self.rank + 1]]
        works = [post(dist.irecv, flat[bounds[r] : bounds[r + 1]], r, tag) for r in mine]
        relays = [self.relays[self.rank][k] for k in self.far] if own.numel() else []
        return works + [post(dist.isend, own, relay, tag) for relay in relays]

    def close(self) -> None:
        """End the threads."""
        self.beside.close()


class Attended:
    """An exchange in pairs under way; who waits for it does its part of what is under way on its host."""

    def __init__(self, hosts: Hosts, posted: Posted) -> None:
        self.hosts, self.posted, self.ends = hosts, posted, posted.ends

    def advance(self, *, wait: bool) -> None:
        """Nothing to do: a thread does this rank's part."""

    def finish(self) -> None:
        """Return when the result is in place."""
        self.hosts.waited(self.posted.finish)


class Relayed:
    """One exchange under way."""

    def __init__(self, hosts: Hosts, line: int, job: Job) -> None:
        flat, bounds, out, gather = job.flat, job.bounds, job.out, job.gather
        self.hosts, self.line = hosts, line
        self.flat, self.bounds, self.out, self.gather = flat, bounds, out, gather
        self.own = bounds[hosts.rank + 1] - bounds[hosts.rank]
        self.remote = [r for r in hosts.ranges[hosts.rank] if r != hosts.rank and bounds[r + 1] > bounds[r]]
        self.advanced = False
        self.copied = not gather
        """Whether this rank has copied all results, and said so."""
        self.stages = [Posted() for _ in range((out is not None) + gather)]
        """Parts of sums have come; results have."""
        self.borrowed: list[Tensor] = []
        pool = hosts.shared.pool
        if out is None:
            sizes = sum(bounds[r + 1] - bounds[r] for r in hosts.ranges[hosts.rank])
            self.staged = pool.borrow(sizes, flat.dtype, shared=True)
            self.borrowed.append(self.staged)
            self._range(hosts.rank).copy_(flat[bounds[hosts.rank] : bounds[hosts.rank + 1]])
        else:
            given = flat[bounds[0] : bounds[-1]]
            inside = hosts.shared.own.offset_of(flat) is not None or not given.numel()
            self.staged = given if inside else pool.borrow(given.numel(), flat.dtype, shared=True).copy_(given)
            self.borrowed += [] if inside else [self.staged]
        self.parts: dict[int, Tensor] = {}
        if out is not None and self.own:
            self.parts = {k: pool.borrow(self.own, flat.dtype) for k in hosts.far}
            self.borrowed += self.parts.values()
        self.count = hosts.shared.say_begun(line, self.staged)
        self.tag, relays = relayed_tag(line, self.count), hosts.relays[hosts.rank]
        self.receives = [post(dist.irecv, part, relays[k], self.tag) for k, part in self.parts.items()]
        if out is None:
            hosts.beside.hand_over(self.stages[-1], self._results(self._send_own()))

    def _range(self, rank: int) -> Tensor:
        """Where this rank's memory has the range of one it stands for."""
        low = self._offset(self.hosts.rank, rank)
        return self.staged[low : low + self.bounds[rank + 1] - self.bounds[rank]]

    def _offset(self, peer: int, rank: int) -> int:
        """At which element of the memory of a rank of this host the range of one it stands for begins."""
        if self.out is not None:
            return self.bounds[rank] - self.bounds[0]
        before = [r for r in self.hosts.ranges[peer] if r < rank]
        return sum(self.bounds[r + 1] - self.bounds[r] for r in before)

    def advance(self, *, wait: bool) -> bool:
        """Sum what this host has of the ranges this rank stands for, and send it on. Result: whether done."""
        shared = self.hosts.shared
        if wait:
            shared.wait_all(self.line, BEGUN, self.count)
        if self.advanced:
            return True
        if not all(shared.board.reached(k, self.line, BEGUN, self.count) for k in shared.others):
            return False
        self.advanced = True
        if self.out is not None:
            self._sum_here(self.out)
        return True

    def _sum_here(self, out: Tensor) -> None:
        hosts, shared, dtype = self.hosts, self.hosts.shared, self.staged.dtype
        for rank in [*self.remote, *([hosts.rank] if self.own else [])]:
            mine, span = self._range(rank), (self._offset(hosts.rank, rank), self._range(rank).numel())
            parts = [
                mine if k == shared.rank else shared.data(k, self.line, self.count, span, dtype)
                for k in range(shared.world)
            ]
            if len(parts) > 1:
                shared.sum_range(parts, mine)
        sends = [post(dist.isend, self._range(rank), rank, self.tag) for rank in self.remote]
        if not self.gather:
            shared.board.put(self.line, READ, self.count)

        def finish() -> None:
            wait_all(self.receives)
            if self.own:
                parts = {**self.parts, hosts.here: self._range(hosts.rank)}
                target = self._range(hosts.rank) if self.gather else out
                sum_in_order([parts[k] for k in range(len(hosts.groups))], target)
            if self.gather:
                hosts.beside.hand_over(self.stages[-1], self._results(self._send_own()))
            wait_all(sends)

        hosts.beside.hand_over(self.stages[0], finish)

    def _send_own(self) -> Works:
        """Send this rank's range to those who stand for it."""
        hosts = self.hosts
        relays = [hosts.relays[hosts.rank][k] for k in hosts.far] if self.own else []
        return [post(dist.isend, self._range(hosts.rank), relay, self.tag | RESULT) for relay in relays]

    def _results(self, sends: Works) -> Callable[[], None]:
        """Receive the results of ranges this rank stands for. A rank sends its own after it has all parts of it."""
        receives = [post(dist.irecv, self._range(rank), rank, self.tag | RESULT) for rank in self.remote]

        def finish() -> None:
            wait_all(receives)
            self.hosts.shared.board.put(self.line, SUMMED, self.count)
            wait_all(sends)

        return finish

    def ends(self) -> bool:
        """Whether `finish` would hardly wait. Results are copied as soon as they lie there: others wait for that."""
        if not self.advance(wait=False) or not all(stage.done.is_set() for stage in self.stages):
            return False
        if not self.copied and self._all_have(SUMMED):
            self._spread()
        return self.copied and self._all_have(READ)

    def _all_have(self, word: int) -> bool:
        """Whether all other ranks of this host have said so."""
        shared = self.hosts.shared
        return all(shared.board.reached(k, self.line, word, self.count) for k in shared.others)

    def finish(self) -> None:
        """Return when the result is in place and nobody needs this rank's memory any more."""
        shared = self.hosts.shared
        self.advance(wait=True)
        for stage in self.stages:
            self.hosts.attend(stage)
        if not self.copied:
            self._spread()
        shared.wait_all(self.line, READ, self.count)
        shared.ended(self)
        shared.pool.give_back(self.borrowed)

    def _spread(self) -> None:
        """Copy the results that lie with the ranks of this host."""
        hosts, shared = self.hosts, self.hosts.shared
        for place, peer in enumerate(hosts.near):
            if peer != hosts.rank:
                shared.board.wait(place, self.line, SUMMED, self.count)
            elif self.staged.data_ptr() == self.flat[self.bounds[0] :].data_ptr():
                continue
            for rank in hosts.ranges[peer]:
                low, high = self.bounds[rank], self.bounds[rank + 1]
                if high > low:
                    span = self._offset(peer, rank), high - low
                    data = shared.data(place, self.line, self.count, span, self.flat.dtype)
                    self.flat[low:high].copy_(data)
        shared.board.put(self.line, READ, self.count)
        self.copied = True
