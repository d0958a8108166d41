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


def summed(parts: list[Tensor]) -> Tensor:
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
    total, name = summed(parts), f"{serial % 5}"  # names come again with other sizes
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


def compare_all(comm: Comm, shared: Shared | None) -> int:
    comm.share(shared, "")
    done = 0
    for serial, (dtype, numel) in enumerate(CASES):
        inside = shared is not None and (serial % 3 == 0 or (serial % 3 == 1 and comm.rank == 0))
        done += compare(comm, numel, dtype, serial, inside=inside)
    return done


def drop_last(sum_range: Callable[..., None]) -> Callable[..., None]:
    """The sabotaged twin: the last rank's part is left out."""

    def short(self: Shared, parts: list[Tensor], out: Tensor) -> None:
        sum_range(self, [*parts[:-1], torch.zeros_like(parts[-1])], out)

    return short


def main() -> None:
    dt.barrier()
    comm = here().comm
    shared = comm.shared
    assert shared is not None, comm.unshared
    if "sabotage" in sys.argv:
        Shared.sum_range = drop_last(Shared.sum_range)  # type: ignore[method-assign]
    done = compare_all(comm, None) if "gloo" in sys.argv else 0
    done += compare_all(comm, shared)
    order = torch.tensor([[1.0], [1e-8], [-1.0]]).repeat(comm.world, 1)[: comm.world]  # where the order shows
    flat = order[comm.rank].clone()
    comm.all_reduce("order", flat, [0, *[1] * comm.world]).wait()
    assert torch.equal(flat, summed(list(order)))
    dt.print(f"{done} exchanges, all to the bit")


if __name__ == "__main__":
    main()
