"""What each process of a pool runs: every exchange against its sum written out, through shared memory and over gloo.

`python -m distributedtorch run --workers N -m tests.core.shared_pool [gloo] [sabotage]`: faults raise, the last line
says how many exchanges were compared. All values are drawn from seeds, so every rank knows what every other one has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import distributedtorch as dt
from distributedtorch.core.comm import Comm
from distributedtorch.core.shared import Shared
from distributedtorch.core.transfer import BEGUN
from distributedtorch.core.world import here

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SIZES = (1, 7, 4099, 70_001)
CASES = [*((dtype, numel) for dtype in DTYPES for numel in SIZES), (torch.float32, 1_100_003)]  # the last in chunks


def drawn(rank: int, numel: int, dtype: torch.dtype, serial: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * serial + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=draw).to(dtype)
    return torch.randint(0, 50, (numel,), generator=draw).to(dtype)


def cuts(numel: int, world: int, serial: int) -> list[int]:
    """Bounds of pieces: even, or drawn, some of them empty."""
    if serial % 2:
        return [numel * k // world for k in range(world + 1)]
    draw = torch.Generator().manual_seed(serial)
    return [0, *sorted(torch.randint(0, numel + 1, (world - 1,), generator=draw).tolist()), numel]


def summed(parts: list[Tensor], comm: Comm) -> Tensor:
    """In rank order; on several hosts each host's sum first."""
    groups = comm.hosts.groups if comm.hosts is not None else [range(comm.world)]
    return in_order([in_order([parts[rank] for rank in group]) for group in groups])


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def memory(comm: Comm, values: Tensor, inside: bool) -> Tensor:
    room = comm.pool.zeros(values.numel(), values.dtype, torch.device("cpu")) if inside else torch.empty_like(values)
    return room.copy_(values)


def compare(comm: Comm, numel: int, dtype: torch.dtype, serial: int, *, inside: bool) -> int:
    """Every kind of exchange of one size; the memory of some ranks lies in the segment, that of others may not."""
    parts = [drawn(k, numel, dtype, serial) for k in range(comm.world)]
    bounds, mine = cuts(numel, comm.world, serial), parts[comm.rank]
    low, high = bounds[comm.rank], bounds[comm.rank + 1]
    total, name = summed(parts, comm), f"{serial % 5}"  # names come again with other sizes
    flat, second = memory(comm, mine, inside), memory(comm, mine, inside)
    both = [comm.all_reduce(f"sum {name}", flat, bounds), comm.reduce_scatter(f"part {name}", second, bounds)]
    for pending in both:
        pending.advance()
    for pending in both:
        pending.wait()
    assert torch.equal(flat, total), f"all-reduce of {numel} {dtype}"
    assert torch.equal(second[low:high], total[low:high]), f"reduce-scatter of {numel} {dtype}"
    second.copy_(mine)
    out = torch.empty(high - low, dtype=dtype)
    comm.reduce_scatter(f"part {name}", second, bounds, out).wait()
    assert torch.equal(out, total[low:high]), f"reduce-scatter of {numel} {dtype} to elsewhere"
    gathered = memory(comm, torch.zeros_like(mine), inside)
    gathered[low:high] = mine[low:high]
    comm.all_gather(f"all {name}", gathered, bounds).wait()
    expected = torch.cat([parts[k][bounds[k] : bounds[k + 1]] for k in range(comm.world)])
    assert torch.equal(gathered, expected), f"all-gather of {numel} {dtype}"
    rows = comm.exchange(f"rows {name}", mine[:100])
    assert torch.equal(rows, torch.stack([part[:100] for part in parts])), f"exchange of {dtype}"
    root = serial % comm.world
    given = memory(comm, mine, inside)
    comm.broadcast(f"from {root}", given, root)
    assert torch.equal(given, parts[root]), f"broadcast of {numel} {dtype}"
    return 6


def compare_all(comm: Comm) -> int:
    done = 0
    for serial, (dtype, numel) in enumerate(CASES):
        inside = comm.shared is not None and (serial % 3 == 0 or (serial % 3 == 1 and comm.rank == 0))
        done += compare(comm, numel, dtype, serial, inside=inside)
    return done


def disorder(comm: Comm) -> None:
    """Exchanges that the ranks begin in other orders come to an end, and to the right one."""
    flats = [memory(comm, torch.full((1000 * k + 1,), float(comm.rank + k)), inside=k % 2 == 0) for k in range(5)]
    order = [(k * (1 + comm.rank % 2) + comm.rank) % 5 for k in range(5)]
    evenly = [[flat.numel() * k // comm.world for k in range(comm.world + 1)] for flat in flats]
    begun = {k: comm.all_reduce(f"disorder {k}", flats[k], evenly[k]) for k in order}
    for k in range(5):
        begun[k].wait()
    for k, flat in enumerate(flats):
        assert torch.equal(flat, torch.full_like(flat, sum(rank + k for rank in range(comm.world)))), f"disorder {k}"


def help_while_waiting(comm: Comm) -> None:
    """A rank that waits in a small exchange still does its part of a large one, for which the others wait first."""
    assert comm.shared is not None
    flat = torch.ones(100_000)
    evenly = [flat.numel() * k // comm.world for k in range(comm.world + 1)]
    line = comm.shared.line("large")
    if comm.rank != 0 and comm.place(0) is not None and line is not None:
        while not comm.shared.board.reached(0, line, BEGUN, 1):  # rank 0 begins first: it cannot do its part at once
            pass
    large = comm.reduce_scatter("large", flat, evenly)
    if comm.rank == 0:
        comm.exchange("small", torch.ones(1))
        large.wait()
    else:
        large.wait()
        comm.exchange("small", torch.ones(1))
    mine = flat[evenly[comm.rank] : evenly[comm.rank + 1]]
    assert torch.equal(mine, torch.full_like(mine, comm.world))


def wait_between_begins(comm: Comm) -> None:
    """Some ranks have begun two exchanges when others finish the second before they begin the first."""
    one, two = (torch.full((comm.world,), float(comm.rank)) for _ in range(2))
    bounds = list(range(comm.world + 1))
    if comm.rank in (0, comm.world - 1):
        first, second = comm.all_gather("first", one, bounds), comm.all_gather("second", two, bounds)
        second.wait()
        first.wait()
    else:
        comm.all_gather("second", two, bounds).wait()
        comm.all_gather("first", one, bounds).wait()
    assert one.tolist() == two.tolist() == list(range(comm.world))


def drop_last(sum_range: Callable[..., None]) -> Callable[..., None]:
    """The sabotaged twin: the last rank's part is left out."""

    def short(self: Shared, parts: list[Tensor], out: Tensor) -> None:
        sum_range(self, [*parts[:-1], torch.zeros_like(parts[-1])], out)

    return short


def main() -> None:
    dt.barrier()
    comm = here().comm
    assert comm.shared is not None, comm.unshared
    if "sabotage" in sys.argv:
        Shared.sum_range = drop_last(Shared.sum_range)  # type: ignore[method-assign]
    done = compare_all(comm)
    if "disorder" in sys.argv:
        disorder(comm)
        help_while_waiting(comm)
        wait_between_begins(comm)
    order = torch.tensor([[1.0], [1e-8], [-1.0]]).repeat(comm.world, 1)[: comm.world]  # where the order shows
    flat = order[comm.rank].clone()
    comm.all_reduce("order", flat, [0, *[1] * comm.world]).wait()
    assert torch.equal(flat, summed(list(order), comm))
    if "gloo" in sys.argv:
        comm.share(None, [], "a test")
        done += compare_all(comm)
    dt.print(f"{done} exchanges, all to the bit")


if __name__ == "__main__":
    main()
