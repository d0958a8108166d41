"""Codes between hosts only: the ranks of a host add their numbers up as they are, codes of that sum go to other hosts.

Lin et al., "Deep Gradient Compression", ICLR 2018 (codes across nodes, sums inside a node).

Of P ranks of a host (of the smallest one, where they differ) each takes a P-th of every buffer: it sums what its host
has of it, exchanges codes with the ranks of the other hosts that have the same part, and gives the decoded sum to its
host. What codes leave out is kept per host, by the rank that has the part.
Each rank holds: what was left out, a P-th of the gradients.
Travels between hosts, per host: 2c(H-1)/H for codes of c bytes, however many ranks a host has; inside 2B(P-1)/P per
rank for B bytes, through shared memory. Use it where hosts have several ranks each and the link between them is slow:
a host's numbers are added up before anything is left out of them. On one host nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.hosts import Hosts
from distributedtorch.core.pairs import Posted
from distributedtorch.core.transfer import Brief, Job, Transfer
from distributedtorch.core.wire import Code, Wire, is_plain
from distributedtorch.wire.feedback import HOSTS, Coded, Sum, clear_padding
from distributedtorch.wire.plain import Plain


def between_hosts(comm: Comm, code: Code) -> Wire:
    """Sums by codes where hosts are known and have several ranks; `spoken` says what comes of it."""
    if comm.hosts is not None:
        return Across(comm, code, comm.hosts)
    return Plain(comm) if comm.shared is not None else Coded(comm, code)


def spoken(comm: Comm) -> str:
    """What comes of codes between hosts here, for the printed line."""
    if comm.hosts is not None:
        return f"dense inside {len(comm.hosts.groups)} hosts, codes across"
    if comm.shared is not None:
        return "dense: all ranks are on one host"
    return f"codes between all ranks ({comm.unshared})"


class Across(Coded):
    """Sums inside each host, and of codes across."""

    def __init__(self, comm: Comm, code: Code, hosts: Hosts) -> None:
        self.hosts, place = hosts, hosts.near.index(comm.rank)
        self.parts = min(map(len, hosts.groups))
        """Into how many parts a buffer is cut: as many ranks of each host exchange codes."""
        super().__init__(comm, code, [group[place] for group in hosts.groups] if place < self.parts else [])

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        stages = () if is_plain(slots, flat.dtype) else ("inside", "given")
        lines = [self.hosts.shared.line(f"{name}/{stage}") for stage in stages]
        found = [line for line in lines if line is not None]
        if len(found) < 2:  # small, or more names than lines
            return self.comm.all_reduce(name, flat, bounds)
        clear_padding(flat, bounds, slots)
        pending = Pending(self.comm, "all-reduce", name)
        pending.work = _Stages(self, name, flat[bounds[0] : bounds[-1]], found)
        return pending

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        raise AssertionError("parts are not what ranks own: plans that divide parameters are refused")

    def state(self) -> dict[str, Tensor]:
        kept = super().state()
        return {**kept, HOSTS: self._where()} if kept else {}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        there = state.get(HOSTS)
        if state and (there is None or there.tolist() != self._where().tolist()):
            said = "each on its own" if there is None else f"on hosts {there.tolist()}"
            given = f"what a wire left out was saved with the ranks {said}"
            do = "start the ranks on hosts as before, or load under another plan: nothing is then left out"
            raise CheckpointError(explain(given, f"as here, {self._where().tolist()}", do))
        super().take_state({name: value for name, value in state.items() if name != HOSTS})

    def _where(self) -> Tensor:
        """The host of each rank: who keeps what depends on it."""
        places = {rank: number for number, group in enumerate(self.hosts.groups) for rank in group}
        return torch.tensor([places[rank] for rank in range(self.comm.world)])


class _Stages(Posted):
    """One sum under way: inside the host, between hosts, and then given to all of the host."""

    def __init__(self, wire: Across, name: str, flat: Tensor, lines: Sequence[int]) -> None:
        super().__init__()
        self.wire, self.name, self.flat, self.lines = wire, name, flat, lines
        self.shared, pool, total = wire.hosts.shared, wire.comm.pool, flat.numel()
        self.cuts = [total * min(k, wire.parts) // wire.parts for k in range(self.shared.world + 1)]
        """Where the part of each rank of this host ends, and the next begins."""
        self.staged = flat
        if flat.device.type != "cpu":
            self.staged = pool.borrow(total, flat.dtype, shared=True).copy_(flat)
        self.mine = self.staged[self.cuts[self.shared.rank] : self.cuts[self.shared.rank + 1]]
        given = total - self.mine.numel() + self.mine.numel() * (self.shared.world - 1)
        wire.comm.traffic["all-reduce"].bytes_sent += given * flat.element_size()
        self.inside = self._begin(Job(self.staged, self.cuts, self.mine, False), lines[0])
        self.across: Sum | None = None
        self.advanced = False

    def _begin(self, job: Job, line: int) -> Transfer | Brief | None:
        """Begin an exchange inside the host, where there is anyone else."""
        return self.shared.begin(line, job) if self.shared.others else None

    def advance(self, *, wait: bool) -> None:
        """Take the host's sum of this rank's part, and send codes of it."""
        if self.advanced or not (wait or self.inside is None or self.inside.ends()):
            return
        self.advanced = True
        if self.inside is not None:
            self.inside.finish()
        hosts, size = len(self.wire.hosts.groups), self.mine.numel()
        if self.wire.peers:
            bounds = [size * k // hosts for k in range(hosts + 1)]
            self.across = Sum(self.wire, self.name, self.mine, bounds, None, everywhere=True)
        else:
            for half in ("sums", "codes"):  # all ranks meet names in the same order
                self.wire.comm.pairs.tag(f"{self.name}/{half}")

    def ends(self) -> bool:
        """Whether `finish` would hardly wait."""
        return self.advanced and (self.across is None or self.across.posted.ends())

    def finish(self) -> None:
        """Return when the sum is in place."""
        self.advance(wait=True)
        if self.across is not None:
            self.wire.hosts.attend(self.across.posted)
            self.wire.hosts.waited(self.across.land)
        given = self._begin(Job(self.staged, self.cuts, None, True), self.lines[1])
        if given is not None:
            given.finish()
        if self.staged is not self.flat:
            self.flat.copy_(self.staged)
            self.wire.comm.pool.give_back([self.staged])
