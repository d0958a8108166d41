"""What each process of a pool runs: PowerSGD's two sums, one after the other beside backward.

`-m tests.conformance.factors_pool [late | keep | whole | early]`: faults raise. `late`: second factors wait for the end
of backward. `keep`: numbers that are not finite are added to what is kept. `whole`: second factors are kept unscaled.
`early`: an exchange is said to have arrived before it has.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor

import distributedtorch as dt
from distributedtorch.core import pairs
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


def a_large_gradient_passes() -> None:
    """What comes after it is finite, whatever was kept of it."""
    for size in (1e100, 1e160, 1e300, 1.7e308):
        wire = PowerSgd(here().comm, 2)
        for step in range(5):
            flat = values(step) * (size if step == 1 else 1.0)
            begun(wire, "bucket", flat).wait()
        assert torch.isfinite(flat).all(), f"a gradient of {size:g} stays"


def arrived_is_all_of_it() -> None:
    """Over gloo an exchange has arrived when all ranges of the sum have, not when this rank's has."""
    comm, go_on, sums = here().comm, threading.Event(), pairs.sum_in_order
    flat, bounds = torch.ones(1 << 12), [(1 << 12) * k // dt.world() for k in range(dt.world() + 1)]

    def held_back(parts: list[Tensor], out: Tensor) -> None:
        go_on.wait()
        sums(parts, out)

    if dt.rank() == dt.world() - 1:
        pairs.sum_in_order = held_back
    pending = comm.all_reduce("held back", flat, bounds)
    if dt.rank() == 0:
        while flat[0] == 1.0:
            pass
        for _ in range(1000):
            assert not pending.arrived(), "said to have arrived before it has"
    dt.barrier()
    go_on.set()
    pending.wait()
    assert (flat == dt.world()).all()
    pairs.sum_in_order = sums


def sabotage(what: str) -> None:
    if what == "late":
        powersgd.go_on = lambda made: made.begun.append(made) or made  # type: ignore[attr-defined]
    elif what == "keep":
        powersgd._finite = lambda parts: [True] * len(parts)
    elif what == "whole":
        PowerSgd.keep_second = lambda self, key, total: self.second.update({key: total.T.contiguous()})  # type: ignore[method-assign]
    else:
        pairs.Posted.ends = lambda self: True  # type: ignore[method-assign]


if __name__ == "__main__":
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if sys.argv[1:]:
        sabotage(sys.argv[1])
    beside_backward()
    nothing_of_an_overflow_is_kept()
    a_large_gradient_passes()
    if here().comm.shared is None:
        arrived_is_all_of_it()
    dt.print("factors as they should be")
