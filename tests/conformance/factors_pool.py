"""What each process of a pool runs: PowerSGD's two sums, one after the other beside backward.

`-m tests.conformance.factors_pool [late | keep | whole | early]`: faults raise. `late`: second factors wait for the end
of backward. `keep`: numbers that are not finite are added to what is kept. `whole`: second factors are kept unscaled.
`early`: an exchange is said to have arrived before it has. With `-m tests.hosts 0,0,1,1` in front: that nobody waits
for a rank of its host that is in another exchange; `held`: results are copied at the end only, as if nobody waited.
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
from distributedtorch.core.hosts import Relayed
from distributedtorch.core.transfer import SUMMED
from distributedtorch.core.world import here
from distributedtorch.wire import powersgd
from distributedtorch.wire.powersgd import PowerSgd
from distributedtorch.wire.twice import Twice


def matrix(rows: int, columns: int) -> Slot:
    return Slot(index=0, start=0, numel=rows * columns, shape=torch.Size((rows, columns)), stride=(columns, 1))


SLOT, LARGE = matrix(64, 48), matrix(4096, 48)
"""The first factors of the large one are more than what goes through shared memory as a short message."""


def values(seed: int, slot: Slot = SLOT) -> Tensor:
    return torch.randn(slot.numel, generator=torch.Generator().manual_seed(10 * seed + dt.rank()))


def begun(wire: PowerSgd, name: str, flat: Tensor, slot: Slot = SLOT) -> Twice:
    bounds = [slot.numel * k // dt.world() for k in range(dt.world() + 1)]
    made: Pending = wire.all_reduce(name, flat, bounds, [slot])
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


def summed(one: Relayed) -> bool:
    """Whether the results of an exchange lie on this host, whoever has copied them."""
    there = one.advance(wait=False) and all(stage.done.is_set() for stage in one.stages)
    return there and one._all_have(SUMMED)


def nobody_is_held() -> None:
    """Between hosts: first factors of a bucket are there, and a neighbour is in another exchange by then."""
    wire, last = PowerSgd(here().comm, 4), dt.rank() % 2
    first = begun(wire, "first bucket", values(1, LARGE), LARGE)
    if last:
        dt.barrier()
    else:
        one = first.first.work
        assert isinstance(one, Relayed)
        while not summed(one):
            pass
    second = begun(wire, "second bucket", values(2, LARGE), LARGE)  # asks whether the first has arrived
    if not last:
        dt.barrier()
    first.wait()
    second.wait()


def autocast_changes_nothing() -> None:
    """A backward may stand in the user's autocast."""
    found = []
    for on in (False, True):
        wire = PowerSgd(here().comm, 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            for step in range(3):
                flat = values(step).float()
                begun(wire, "bucket", flat).wait()
        found.append(flat)
    assert torch.equal(*found), "factors hang on the user's autocast"


def sabotage(what: str) -> None:
    if what == "held":
        Relayed.ends = summed  # type: ignore[method-assign]
    elif what == "late":
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
    if here().comm.hosts is not None:
        nobody_is_held()
    else:
        beside_backward()
    autocast_changes_nothing()
    nothing_of_an_overflow_is_kept()
    a_large_gradient_passes()
    if here().comm.shared is None:
        arrived_is_all_of_it()
    dt.print("factors as they should be")
