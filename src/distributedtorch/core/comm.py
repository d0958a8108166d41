"""The one place that calls collectives: named exchanges between the ranks of one world.

On CPU tensors every exchange is made of direct sends and receives between pairs of ranks, each under a tag made of the
exchange's logical name and its count. So a rank that is in another exchange can never be taken for a partner: both
wait, and the watch names them. The sum is taken in rank order on the owner of each piece: bit-identical on all ranks
and over runs, and the same bits under every plan.

Bytes sent by a rank, for a buffer of B bytes over N ranks: reduce-scatter B(N-1)/N, all-gather B(N-1)/N, all-reduce
2B(N-1)/N. (gloo's own reduce-scatter sends as much as its all-reduce.)

CUDA tensors go through NCCL's collectives where the world has it; else they are staged through host memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distributedtorch.core.errors import PeerError

_CHANNEL_BITS, _COUNT_BITS = 14, 16
_SUM = 1 << _CHANNEL_BITS + _COUNT_BITS
"""In a tag: the second half of an all-reduce."""
_HOST = torch.device("cpu")


@dataclass
class Traffic:
    """What one kind of exchange has cost this rank."""

    count: int = 0
    """Exchanges begun."""
    bytes_sent: int = 0
    """Payload bytes this rank sent."""
    seconds: float = 0.0
    """Seconds the training thread was held by it."""


class Pending:
    """An exchange under way. `wait` returns when its result is in place, or raises what went wrong."""

    def __init__(self, comm: Comm, kind: str, name: str) -> None:
        self.comm, self.kind, self.name = comm, kind, name
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.tail: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Hold the calling thread until the result is in place."""
        with self.comm.held(self.kind, self.name):
            self.done.wait()
            if self.error is not None:
                raise self.error
            for finish in self.tail:
                finish()
            self.tail = []


class Comm:
    """The exchanges of one rank with its world."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.waiting: tuple[str, float] | None = None
        """The exchange the training thread is held in, and since when (monotonic); read by the watch."""
        self.before_waiting: list[Callable[[], None]] = []
        """Called before the training thread waits for others."""
        self.count = 0
        self._counts: dict[str, int] = defaultdict(int)
        self._jobs: queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    # The exchanges a part asks for.

    def reduce_scatter(self, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None = None) -> Pending:
        """Sum `flat` over ranks; afterwards `out`, or else this rank's piece of `flat`, holds the result."""
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

    def exchange(self, name: str, mine: Tensor) -> Tensor:
        """Every rank's `mine` (same shape and dtype), stacked in rank order. For small things; holds the caller."""
        return self.exchange_begin(name, mine)()

    def exchange_begin(self, name: str, mine: Tensor) -> Callable[[], Tensor]:
        """As `exchange`, but begun now and finished by calling the result."""
        host = mine.detach().to("cpu").contiguous()
        out = torch.empty((self.world, *host.shape), dtype=host.dtype)
        out[self.rank] = host
        flat = out.view(-1)
        bounds = [host.numel() * k for k in range(self.world + 1)]
        tag = self._tag(name)
        self.count_sent("small", host.numel() * host.element_size() * (self.world - 1))
        receives, sends = self._gather_posts(flat, bounds, tag)

        def finish() -> Tensor:
            with self.held("small", name):
                _wait_all(receives + sends)
            return out.to(mine.device)

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
        if self.world == 1:
            return
        host = tensor.detach() if _direct(tensor) else tensor.detach().to("cpu").contiguous()
        if host.numel():
            tag = self._tag(name)
            with self.held("broadcast", name):
                if self.rank == root:
                    self.count_sent("broadcast", host.numel() * host.element_size() * (self.world - 1))
                    _wait_all([_post(dist.isend, host, k, tag) for k in self._others()])
                else:
                    _wait_all([_post(dist.irecv, host, root, tag)])
        if host is not tensor and self.rank != root:
            tensor.detach().copy_(host)

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

    # How they are made.

    def _begin(
        self, kind: str, name: str, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool
    ) -> Pending:
        pending = Pending(self, kind, name)
        if self.world == 1:
            pending.done.set()
            return pending
        if flat.is_cuda and _has_nccl():
            return self._nccl(pending, flat, bounds, reduce=out is not None, gather=gather)
        host = flat if _direct(flat) else flat.to("cpu")
        if host is not flat:
            pending.tail.append(lambda: _copy_result(flat, host, bounds, self.rank, gather=gather))
        if out is not None and host is not flat:
            out = host[bounds[self.rank] : bounds[self.rank + 1]]
        self._direct_exchange(pending, host, bounds, out, gather=gather)
        return pending

    def _direct_exchange(
        self, pending: Pending, flat: Tensor, bounds: Sequence[int], out: Tensor | None, *, gather: bool
    ) -> None:
        """Post what can be posted now; the progress thread sums and posts the rest."""
        tag = self._tag(pending.name)
        size = flat.element_size()
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        total, own = bounds[-1] - bounds[0], mine.stop - mine.start
        if out is None:
            self.count_sent(pending.kind, own * (self.world - 1) * size)
            receives, sends = self._gather_posts(flat, bounds, tag)
            self._hand_over(pending, lambda: _wait_all(receives + sends))
            return
        self.count_sent(pending.kind, (total - own + (own * (self.world - 1) if gather else 0)) * size)
        parts = {k: self.borrow(own, flat.dtype) for k in self._others()} if own else {}
        received = list(parts.values())
        receives = [_post(dist.irecv, part, k, tag) for k, part in parts.items()]
        theirs = [(flat[bounds[k] : bounds[k + 1]], k) for k in self._others() if bounds[k + 1] > bounds[k]]
        sends = [_post(dist.isend, piece, k, tag) for piece, k in theirs]
        # A rank sends its sum when all parts of it have come, so the sum may be received over what was sent.
        sums = [_post(dist.irecv, piece, k, tag | _SUM) for piece, k in theirs] if gather else []

        def finish() -> None:
            _wait_all(receives)
            if own:
                parts[self.rank] = flat[mine]
                _sum_in_order([parts[k] for k in range(self.world)], out)
                self.give_back(received)
                if gather:
                    sends.extend(_post(dist.isend, flat[mine], k, tag | _SUM) for k in self._others())
            pending.tail.insert(0, lambda: _wait_all(sends + sums))

        self._hand_over(pending, finish)

    def _gather_posts(self, flat: Tensor, bounds: Sequence[int], tag: int) -> tuple[_Works, _Works]:
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
        receives = [
            _post(dist.irecv, flat[bounds[k] : bounds[k + 1]], k, tag)
            for k in self._others()
            if bounds[k + 1] > bounds[k]
        ]
        sends = [_post(dist.isend, mine, k, tag) for k in self._others()] if mine.numel() else []
        return receives, sends

    def _nccl(self, pending: Pending, flat: Tensor, bounds: Sequence[int], *, reduce: bool, gather: bool) -> Pending:
        """The same on NCCL's stream: whole-buffer calls where pieces are equal, one per owner where not."""
        works: _Works = []
        pieces = [flat[bounds[k] : bounds[k + 1]] for k in range(self.world)]
        self.count_sent(pending.kind, (bounds[-1] - bounds[0]) * flat.element_size() * (self.world - 1) // self.world)
        if reduce:
            if gather:
                works.append((dist.all_reduce(flat[bounds[0] : bounds[-1]], async_op=True), self.rank))
            else:
                works.extend((dist.reduce(p, k, async_op=True), k) for k, p in enumerate(pieces) if p.numel())
        else:
            works.extend((dist.broadcast(p, k, async_op=True), k) for k, p in enumerate(pieces) if p.numel())
        pending.tail.append(lambda: _wait_all(works))
        pending.done.set()
        return pending

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
        """Memory for a while: used again rather than asked of the system anew, where the size it last had is near.

        On accelerators torch's own allocator does that.
        """
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        free = self._free[dtype, device]
        fits = [k for k, block in enumerate(free) if numel <= block.numel() <= 2 * numel]
        if fits:
            block = free.pop(min(fits, key=lambda k: free[k].numel()))
            # Not a view of it: nothing else is to look at this memory.
            return block.new_empty(0).set_(block.untyped_storage(), 0, (numel,), (1,))
        small = [k for k, block in enumerate(free) if block.numel() < numel]
        if small:
            free.pop(small[0])  # let it go, so that there are hardly more blocks than are used at once
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, tensors: list[Tensor]) -> None:
        """Return borrowed memory."""
        for tensor in [tensor for tensor in tensors if tensor.device.type == "cpu"]:
            block = tensor.new_empty(0).set_(tensor.untyped_storage())
            self._free[tensor.dtype, tensor.device].append(block)

    def let_go(self) -> None:
        """Keep no memory for later."""
        self._free.clear()

    def _hand_over(self, pending: Pending, finish: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._progress, name="distributedtorch-exchange", daemon=True)
            self._thread.start()
        self._jobs.put((pending, finish))

    def _progress(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            pending, run = job
            try:
                run()
            except BaseException as error:
                pending.error = error
            done = pending.done
            del job, pending, run  # before anyone goes on: gloo's handles must not be freed while Python ends
            done.set()

    def close(self) -> None:
        """End the progress thread; it may be held by a rank that is gone, so not for ever."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=1.0)

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning after itself so that not all talk to one."""
        return [(self.rank + k) % self.world for k in range(1, self.world)]

    def _tag(self, name: str) -> int:
        self._counts[name] += 1
        self.count += 1
        channel = zlib.crc32(name.encode()) & ((1 << _CHANNEL_BITS) - 1)
        return channel << _COUNT_BITS | (self._counts[name] & ((1 << _COUNT_BITS) - 1))

    def count_sent(self, kind: str, bytes_sent: int) -> None:
        """Add an exchange to the traffic."""
        traffic = self.traffic[kind]
        traffic.count += 1
        traffic.bytes_sent += bytes_sent


class _Held:
    """Marks the training thread as waiting, and counts the seconds."""

    def __init__(self, comm: Comm, kind: str, name: str) -> None:
        self.comm, self.kind, self.name = comm, kind, name

    def __enter__(self) -> None:
        for act in self.comm.before_waiting:
            act()
        self.began = time.monotonic()
        self.comm.waiting = (self.name, self.began)

    def __exit__(self, *_: object) -> None:
        self.comm.waiting = None
        self.comm.traffic[self.kind].seconds += time.monotonic() - self.began


_Works = list[tuple["dist.Work | None", int]]


def _wait_all(works: _Works) -> None:
    for work, peer in works:
        with peer_errors(peer):
            if work is not None:
                work.wait()


def _post(call: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int) -> tuple[dist.Work | None, int]:
    with peer_errors(peer):
        return call(tensor, peer, tag=tag), peer


@contextlib.contextmanager
def peer_errors(peer: int) -> Iterator[None]:
    """A block in which an error of the connection means that `peer` is gone."""
    try:
        yield
    except RuntimeError as error:
        raise _gone(peer, error) from None


def _gone(peer: int, error: RuntimeError) -> PeerError:
    said = str(error).splitlines()[0]
    said = said.split("] ", 1)[-1].split(". This is typically")[0]
    return PeerError(f"rank {peer} is gone or out of reach ({said})")


def _sum_in_order(parts: list[Tensor], out: Tensor) -> None:
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    torch.add(total, parts[-1], out=out)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _copy_result(flat: Tensor, host: Tensor, bounds: Sequence[int], rank: int, *, gather: bool) -> None:
    where = slice(bounds[0], bounds[-1]) if gather else slice(bounds[rank], bounds[rank + 1])
    flat[where].copy_(host[where])


def _direct(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend_config().lower() if hasattr(dist, "get_backend_config") else False
