"""What each process of a pool runs: codes between hosts only, beside the algorithm written out by hand.

`-m tests.hosts 0,0,1,1 tests.conformance.across_pool FOLDER [large] [forget]`: faults raise. `large`: what is small
goes the way of what is large; `forget`: what codes leave out is not kept. Without `tests.hosts`, all are on one host.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import distributedtorch as dt
from distributedtorch.core import shared
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.ddp import Ddp
from distributedtorch.wire.hosts import Across
from tests.conformance.loose_pool import compare, stepping
from tests.conformance.wires_pool import ByHand, distributed, forget, in_rounds, topk, truth

WIRE = "wire=topk(0.1,hosts)"
PLANS = (f"ddp,{WIRE}", f"local(every=3),{WIRE}", f"diloco(every=3),{WIRE}")


class BetweenHosts(ByHand):
    """Hosts add their ranks' numbers up; codes of each part of these sums go between hosts."""

    def __init__(self, hosts: list[list[int]]) -> None:
        super().__init__(topk, feedback=True)
        self.hosts = hosts

    def __call__(
        self, name: str, count: int, parts: list[Tensor], bounds: tuple[int, ...], *, half: bool = False
    ) -> Tensor:
        sums = [torch.stack([parts[rank] for rank in host]).sum(dim=0) for host in self.hosts]
        low, size, ways = bounds[0], bounds[-1] - bounds[0], min(map(len, self.hosts))
        total = torch.zeros_like(parts[0])
        for part in range(ways):
            first, last = low + size * part // ways, low + size * (part + 1) // ways
            cuts = tuple(first + (last - first) * k // len(sums) for k in range(len(sums) + 1))
            total += super().__call__(f"{name}, part {part}", count, sums, cuts)
        return total


def equal(hosts: list[list[int]]) -> None:
    for delay, plan in enumerate((f"ddp,{WIRE}", f"ddp,delay=1,{WIRE}")):
        compare(plan, truth("topk(0.1)", BetweenHosts(hosts), delay=delay), distributed(plan))
        release()
    for sync in ("local", "diloco"):
        by_hand = in_rounds("topk(0.1)", BetweenHosts(hosts), outer=sync == "diloco")
        compare(f"{sync},{WIRE}", by_hand, distributed(f"{sync}(every=2),{WIRE}"))
        release()


def saved(folder: Path) -> None:
    """What was left out is in the checkpoint, and not taken by ranks that lie elsewhere."""
    for number, plan in enumerate(PLANS):
        model, step = stepping(plan)
        for k in range(4):
            step(k)
        kept = [name for name in here().loop.members[0].sync.own_state() if "sent/" in name]
        wire = here().loop.members[0].sync.wire  # type: ignore[attr-defined]
        assert isinstance(wire, Across) and bool(kept) == bool(wire.peers), f"{plan}: nothing left out is kept"
        dt.save(folder / str(number))
        for k in range(4, 8):
            step(k)
        before = [p.detach().clone() for p in model.parameters()]
        release()
        model, step = stepping(plan)
        dt.load(folder / str(number))
        for k in range(4, 8):
            step(k)
        assert all(map(torch.equal, before, model.parameters())), f"{plan}: goes on in another way after dt.load"
        if plan == PLANS[0] and kept:
            sync = here().loop.members[0].sync
            assert isinstance(sync, Ddp)
            state = sync.own_state()
            with pytest.raises(dt.CheckpointError, match="with the ranks on hosts"):
                sync.take_own_state({**state, "wire/hosts": state["wire/hosts"].flip(0)})
        release()


def dense() -> None:
    """On one host it is as without a wire."""
    for sync in ("ddp", "local(every=2)"):
        without = distributed(sync)
        release()
        assert all(map(torch.equal, without, distributed(f"{sync},{WIRE}"))), f"{sync}: other numbers on one host"
        release()


def main(folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if "large" in words:
        shared._BRIEF = 0
    if "forget" in words:
        forget()
    across = here().comm.hosts
    if across is None:
        dense()
    else:
        equal([list(group) for group in across.groups])
        saved(folder)
    dt.print("across hosts as written out")


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), sys.argv[2:])
