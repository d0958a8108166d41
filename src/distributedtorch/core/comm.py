"""The one place that parts ask for exchanges: named, counted, timed, and seen by the watch.

Tensors in host memory go through memory that the ranks of one host share (`shared`), on several hosts through that
inside and over gloo across (`hosts`), or else over gloo in pairs (`pairs`). The first and the last sum in rank order:
the same bits. CUDA tensors go through NCCL's collectives where the world has it; else they are staged through host
memory.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distributedtorch.core import nccl
from distributedtorch.core.errors import DesyncError
from distributedtorch.core.hosts import Attended, Hosts, Relayed
from distributedtorch.core.pairs import Pairs, Posted, wait_all
from distributedtorch.core.pool import Pool
from distributedtorch.core.shared import Shared
from distributedtorch.core.transfer import Brief, Job, Transfer


@dataclass
class Traffic:
    """What one kind of exchange has cost this rank."""

    count: int = 0
    """Exchanges begun."""
    bytes_sent: int = 0
    """Payload bytes this rank gave to others: sent to them, or read by them where memory is shared."""
    seconds: float = 0.0
    """Seconds the training thread was held by it."""


class Pending:
    """An exchange under way. `wait` returns when its result is in place, or raises what went wrong."""

    def __init__(self, comm: Comm, kind: str, name: str) -> None:
        self.comm, self.kind, self.name = comm, kind, name
        self.work: Posted | Transfer | Brief | Relayed | Attended | None = None
        self.tail: list[Callable[[], None]] = []

    def arrived(self) -> bool:
        """Whether `wait` would hardly hold anyone."""
        return self.work is None or self.work.ends()

    def starts(self) -> bool:
        """Take it on, as far as that holds nobody. Result: whether all of it has begun."""
        self.arrived()
        return True

    def advance(self) -> None:
        """Do this rank's part of it; several are waited for sooner where all of them are advanced first."""
        if self.work is not None:
            with self.comm.held(self.kind, self.name):
                self.work.advance(wait=True)

    def wait(self) -> None:
        """Hold the calling thread until the result is in place."""
        with self.comm.held(self.kind, self.name):
            if self.work is not None:
                self.work.finish()
            for finish in self.tail:
                finish()
            self.tail = []


class Comm:
    """The exchanges of one rank with its world, or with a part of it (`part`), in which ranks are places."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.alone = rank, world, world == 1
        self.whole = self
        """All ranks of the job."""
        self.members: Sequence[int] = range(world)
        """The ranks of the job that take part."""
        self.group: dist.ProcessGroup | None = None
        """NCCL's group of them, where they are not all."""
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.waiting: tuple[str, float, Comm] | None = None
        """The exchange the training thread is held in, since when (monotonic), and whose; read by the watch."""
        self.before_waiting: list[Callable[[], None]] = []
        """Called before the training thread waits for others."""
        self.count = 0
        """Exchanges begun."""
        self.pool = Pool()
        self.pairs = Pairs(rank, world, self.pool)
        self.shared: Shared | None = None
        """Memory shared with the ranks of this host."""
        self.hosts: Hosts | None = None
        """How they exchange with those of other hosts, where there are any."""
        self.beside: Hosts | None = None
        """What goes on on this host while this rank waits over gloo."""
        self.unshared = ""
        """Why there is no shared memory."""

    def share(self, shared: Shared | None, groups: Sequence[Sequence[int]], reason: str) -> None:
        """Exchange through shared memory from now on, inside each host, or say why not."""
        self.shared, self.unshared = shared, reason
        self.hosts = Hosts(self.rank, groups, shared) if shared is not None and len(groups) > 1 else None
        self.beside = self.hosts
        self.pool.own = shared.own if shared is not None else None
        if shared is not None:
            shared.pool = self.pool

    # The exchanges a part asks for.

    def reduce_scatter(self, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None = None) -> Pending:
        """Sum `flat` over ranks; afterwards `out`, or else this rank's piece of `flat`, holds the result.

        What the rest of `flat` holds then is not defined.
        """
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
        if out is not None and not (_direct(flat) and self.world > 1):
            pending = self._begin("reduce-scatter", name, flat, bounds, mine, gather=False)
            pending.tail.append(lambda: _copy(mine, out))
            return pending
        return self._begin("reduce-scatter", name, flat, bounds, mine if out is None else out, gather=False)

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int]) -> Pending:
        """Sum `flat` over ranks, everywhere; `bounds` says who sums what."""
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
        return self._begin("all-reduce", name, flat, bounds, mine, gather=True)

    def all_gather(self, name: str, flat: Tensor, bounds: Sequence[int]) -> Pending:
        """Spread every rank's piece of `flat` to all."""
        return self._begin("all-gather", name, flat, bounds, None, gather=True)

    def spread(self, name: str, flat: Tensor, bounds: Sequence[int]) -> Pending:
        """Bring every rank's piece of what exists once per host to the other hosts."""
        pending = Pending(self, "all-gather", name)
        if self.hosts is None:
            return pending
        hosts, line = self.hosts, self._line(name)
        own = bounds[self.rank + 1] - bounds[self.rank]
        self.count_sent("all-gather", own * len(hosts.far) * flat.element_size())
        if line is None:
            pending.work = self.pairs.begin(name, flat, bounds, None, gather=True)
            return pending
        works = hosts.spread(line, flat, bounds)
        pending.tail.append(lambda: hosts.waited(lambda: wait_all(works)))
        return pending

    def exchange(self, name: str, mine: Tensor) -> Tensor:
        """Every rank's `mine` (same shape and dtype), stacked in rank order. For small things; holds the caller."""
        return self.exchange_begin(name, mine)()

    def exchange_begin(self, name: str, mine: Tensor) -> Callable[[], Tensor]:
        """As `exchange`, but begun now and finished by calling the result.

        What lies on a GPU stays there where the world has NCCL: the order of its streams is enough, nobody waits.
        """
        if mine.is_cuda and nccl.is_there():
            self.whole.count += 1
            self.count_sent("small", mine.numel() * mine.element_size() * (self.world - 1))
            return nccl.exchange(self.group, mine, self.world)
        host = mine.detach().to("cpu").contiguous()
        self.count_sent("small", host.numel() * host.element_size() * (self.world - 1))
        line = self._line(name, everywhere=True)
        if self.shared is None or line is None:
            last, beside = self.pairs.exchange(name, host), self.beside
        else:
            last, beside = self.shared.exchange(line, host), None

        def finish() -> Tensor:
            with self.held("small", name):
                found: Tensor = last() if beside is None else beside.waited(last)
                return found.to(mine.device)

        return finish

    def bytes_of_all(self, name: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order (any lengths)."""
        sizes = self.exchange(f"{name}/size", torch.tensor([len(mine)])).view(-1).tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self.exchange(f"{name}/bytes", padded)
        return [bytes(rows[k, : sizes[k]].tolist()) for k in range(self.world)]

    def broadcast(self, name: str, tensor: Tensor, root: int = 0) -> None:
        """Give every rank `root`'s values of `tensor`, in place."""
        if self.world == 1 or not tensor.numel():
            return
        host = tensor.detach() if _direct(tensor) else tensor.detach().to("cpu").contiguous()
        others = self.world - 1 if self.rank == root else 0
        self.count_sent("broadcast", host.numel() * host.element_size() * others)
        line = self._line("broadcast", everywhere=True, said=name)
        with self.held("broadcast", name):
            if self.shared is not None and line is not None:
                if not self.shared.broadcast(line, host, root, zlib.crc32(f"{name} from {root}".encode())):
                    raise DesyncError(f"the ranks broadcast different things at once; this one: {name!r}")
            elif self.beside is not None:
                self.beside.waited(lambda: self.pairs.broadcast(name, host, root))
            else:
                self.pairs.broadcast(name, host, root)
        if host is not tensor and self.rank != root:
            tensor.detach().copy_(host)

    def swap(self, name: str, mine: Tensor, peer: int, count: int) -> Tensor:
        """Give `mine` to one other rank, which does the same at its own `count`, and get its tensor of the same kind.

        Nobody else takes part.
        """
        host = mine.detach().to("cpu").contiguous()
        found, none = torch.empty_like(host), host.new_empty(0)
        self.count_sent("swap", host.numel() * host.element_size())
        out, into = ([one if k == peer else none for k in range(self.world)] for one in (host, found))
        with self.timed("swap"):  # the others are elsewhere, and may be
            wait_all(self.pairs.swap(self.pairs.tag(name, count), out, into))
        return found.to(mine.device)

    def barrier(self, name: str = "barrier") -> None:
        """Return when every rank has come here."""
        if self.world > 1:
            self.exchange(name, torch.zeros(1))

    def held(self, kind: str, name: str) -> _Held:
        """A block in which the training thread waits for others."""
        return _Held(self, kind, name)

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """As `held`, where the others' training threads are not waited for, so that the watch has nothing to say."""
        began = time.monotonic()
        yield
        self.traffic[kind].seconds += time.monotonic() - began

    def count_sent(self, kind: str, bytes_sent: int) -> None:
        """Add an exchange to the traffic."""
        traffic = self.traffic[kind]
        traffic.count += 1
        traffic.bytes_sent += bytes_sent

    def place(self, peer: int) -> int | None:
        """A rank's place among those that share memory with this one, if it does."""
        if self.shared is None or self.hosts is None:
            return peer if self.shared is not None else None
        return self.hosts.near.index(peer) if peer in self.hosts.near else None

    def close(self) -> None:
        """End what runs beside the training thread."""
        self.pairs.close()
        if self.hosts is not None:
            self.hosts.close()

    # How they are made.

    def _begin(
        self, kind: str, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool
    ) -> Pending:
        pending = Pending(self, kind, name)
        if self.alone:
            return pending
        self.count_sent(kind, self._bytes(flat, bounds, reduce=out is not None, gather=gather))
        if flat.is_cuda and nccl.is_there():
            self.whole.count += 1
            among = self.group, self.members, self.rank
            works = nccl.begin(among, flat, bounds, reduce=out is not None, gather=gather)
            pending.tail.append(lambda: wait_all(works))
            return pending
        if not _direct(flat):
            flat, bounds, out = self._staged(pending, flat[bounds[0] : bounds[-1]], bounds, out, gather=gather)
        line = self._line(name)
        if self.hosts is not None and line is not None:
            pending.work = self.hosts.begin(line, Job(flat, bounds, out, gather))
        elif self.shared is not None and line is not None:
            pending.work = self.shared.begin(line, Job(flat, bounds, out, gather))
        else:
            posted = self.pairs.begin(name, flat, bounds, out, gather=gather)
            pending.work = posted if self.beside is None else Attended(self.beside, posted)
        return pending

    def _staged(
        self, pending: Pending, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool
    ) -> tuple[Tensor, list[int], Tensor | None]:
        """The same exchange in host memory; its result is copied back when it is waited for."""
        ends = [bound - bounds[0] for bound in bounds]
        host = self.pool.borrow(flat.numel(), flat.dtype, shared=True).copy_(flat)
        mine = slice(ends[self.rank], ends[self.rank + 1])

        def back() -> None:
            where = slice(None) if gather else mine
            flat[where].copy_(host[where])
            self.pool.give_back([host])

        pending.tail.append(back)
        return host, ends, None if out is None else host[mine]

    def _line(self, name: str, *, everywhere: bool = False, said: str = "") -> int | None:
        """Where an exchange through shared memory is announced; None: it goes over gloo.

        `everywhere`: it goes through shared memory only where all ranks share it; `said`: what gloo knows it by.
        """
        self.whole.count += 1
        if self.whole is not self:  # other groups may go over gloo: channels are settled in the same order by all ranks
            self.pairs.meet(said or name)
        if everywhere and self.hosts is not None:
            return None
        return self.shared.line(name) if self.shared is not None else None

    def _bytes(self, flat: Tensor, bounds: Sequence[int], *, reduce: bool, gather: bool) -> int:
        """Bytes that this rank gives to others."""
        if self.hosts is not None:
            return self.hosts.given(bounds, reduce=reduce, gather=gather) * flat.element_size()
        total, own = bounds[-1] - bounds[0], bounds[self.rank + 1] - bounds[self.rank]
        return ((total - own) * reduce + own * (self.world - 1) * gather) * flat.element_size()


class _Held:
    """Marks the training thread as waiting, and counts the seconds."""

    def __init__(self, comm: Comm, kind: str, name: str) -> None:
        self.comm, self.kind, self.name, self.among = comm.whole, kind, name, comm

    def __enter__(self) -> None:
        for act in self.comm.before_waiting:
            act()
        self.began = time.monotonic()
        self.comm.waiting = (self.name, self.began, self.among)

    def __exit__(self, *_: object) -> None:
        self.comm.waiting = None
        self.comm.traffic[self.kind].seconds += time.monotonic() - self.began


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _direct(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
