"""What each process of a pool runs: PowerSGD's two sums, one after the other beside backward.

`-m tests.conformance.factors_pool [late | keep]`: faults raise. `late`: second factors wait for the end of backward.
`keep`: numbers that are not finite are added to what is kept.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import distributedtorch as dt
from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Pending
from distributedtorch.core.world import here
from distributedtorch.wire import powersgd
from distributedtorch.wire.powersgd import PowerSgd
from distributedtorch.wire.twice import Twice

ROWS, COLUMNS = 64, 48
SLOT = Slot(index=0, start=0, numel=ROWS * COLUMNS, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1))


def values(seed: int) -> Tensor:
    return torch.randn(SLOT.numel, generator=torch.Generator().manual_seed(10 * seed + dt.rank()))


def begun(wire: PowerSgd, name: str, flat: Tensor) -> Twice:
    bounds = [SLOT.numel * k // dt.world() for k in range(dt.world() + 1)]
    made: Pending = wire.all_reduce(name, flat, bounds, [SLOT])
    assert isinstance(made, Twice)
    return made


def beside_backward() -> None:
    """Second factors leave with the next bucket, once first ones have come."""
    wire = PowerSgd(here().comm, 2)
    first = begun(wire, "first bucket", values(1))
    dt.barrier()
    first.first.arrived()  # does this rank's part of it
    dt.barrier()
    while not first.first.arrived():
        pass
    second = begun(wire, "second bucket", values(2))
    assert first.second is not None, "second factors wait for the end of backward"
    first.wait()
    second.wait()
    assert not wire.begun


def nothing_of_an_overflow_is_kept() -> None:
    """One rank's infinite number reaches all, and nobody keeps anything of that step."""
    wire = PowerSgd(here().comm, 2)
    for step in range(3):
        begun(wire, "bucket", values(step)).wait()
    left, second = (next(iter(kept.values())).clone() for kept in (wire.left, wire.second))
    flat = values(3)
    if dt.rank() == dt.world() - 1:
        flat[5] = torch.inf
    begun(wire, "bucket", flat).wait()
    assert not torch.isfinite(flat).any()
    now = next(iter(wire.left.values()))
    assert (now - left).abs().max() <= 1e-12, "something of an overflow is kept"
    assert torch.equal(next(iter(wire.second.values())), second)
    flat = values(4)
    begun(wire, "bucket", flat).wait()
    assert torch.isfinite(flat).all()


def sabotage(what: str) -> None:
    if what == "late":
        powersgd.go_on = lambda made: made.begun.append(made) or made  # type: ignore[attr-defined]
    else:
        powersgd.is_finite = lambda values: True  # type: ignore[attr-defined]


if __name__ == "__main__":
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if sys.argv[1:]:
        sabotage(sys.argv[1])
    beside_backward()
    nothing_of_an_overflow_is_kept()
    dt.print("factors as they should be")
