"""What each process of a pool runs: parameters once per host, and nobody looks while they change.

`-m tests.conformance.share_pool [sabotage]`: faults raise. Sabotaged, the fence before the update is left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from typing import Any

import pytest
import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.core.comm import Comm
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.once import OncePerHost
from distributedtorch.sync.zero import Zero

SECONDS = 30.0


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def meddling(model: nn.Sequential) -> torch.optim.Optimizer:
    """An optimizer whose step edits more than the parameters it is given."""
    optimizer = adam(model)
    own = optimizer.step
    optimizer.step = lambda: (own(), model[0].weight.data.mul_(0.9))  # type: ignore[assignment,method-assign,operator,union-attr,return-value]
    return optimizer


def build(plan: str, make: Any = adam) -> tuple[nn.Module, torch.optim.Optimizer, OncePerHost]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    model, optimizer = dt.distribute(model, make(model), plan=plan, batches="own")
    sync = here().loop.members[0].sync
    assert isinstance(sync, Zero) and isinstance(sync.memory, OncePerHost)
    return model, optimizer, sync.memory


def anonymous(tensor: torch.Tensor) -> int:
    """KiB that this process has of its own in the mapping a tensor lies in."""
    at, inside = tensor.data_ptr(), False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                inside = low <= at < high
            elif inside and first == "Anonymous:":
                return int(line.split()[1])
    raise AssertionError("no such mapping")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def once_per_host(plan: str) -> None:
    model, optimizer, memory = build(plan)
    for _ in range(3):
        train(model, optimizer)
        assert [anonymous(p) for p in model.parameters()] == [0] * 4  # what it looks at is not its own
    total = sum(4 * p.numel() for p in model.parameters())
    assert dt.stats().bytes_held["parameters"] == total // dt.world()
    before = model[0].weight.detach().clone()
    model[0].weight.data.mul_(0.5)
    assert anonymous(model[0].weight) > 0
    assert torch.equal(model[0].weight, before * 0.5)  # an edit is seen here at once
    assert memory.memory.edited() > 0
    train(model, optimizer)
    assert memory.memory.edited() == 0
    assert anonymous(model[0].weight) == 0
    same = here().comm.exchange("weights", model[0].weight.detach().clone())
    assert all(torch.equal(row, same[0]) for row in same)
    assert (model[0].weight - before * 0.5).abs().max() <= 0.11  # one step away from what was edited
    held = model[0].weight.detach()
    before = held.clone()
    release()
    dt.barrier()
    assert torch.equal(held, before) and torch.equal(model[0].weight, before)  # who holds it keeps it
    with torch.no_grad():
        model[0].weight.fill_(float(dt.rank()))
    dt.barrier()
    assert model[0].weight.unique().tolist() == [dt.rank()]  # memory of its own again


def nobody_looks_while_they_change() -> None:
    """Rank 0 looks at the weights between backward and step, until the others stand before its step or after it."""
    model, optimizer, _ = build("zero1,share")
    comm = here().comm
    assert comm.shared is not None
    lines = [comm.shared.line(name) for name in ("looked at/0", "updated/0")]
    train(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]  # no rank can step before all have given gradients
    model(torch.ones(4, 300)).square().mean().backward()
    if dt.rank() == 0:
        counts = [comm.shared._counts.get(line or 0, 0) + 1 for line in lines]
        until = time.monotonic() + SECONDS
        said = [(line, n) for line, n in zip(lines, counts, strict=True) if line is not None]
        board, others = comm.shared.board, comm.shared.others
        while not all(any(board.reached(k, line, 0, n) for line, n in said) for k in others):
            assert time.monotonic() < until
            time.sleep(0.001)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)), "changed under rank 0"
    optimizer.step()
    release()


def edits_inside_a_step_are_refused() -> None:
    model, optimizer, _ = build("zero1,share", meddling)
    with pytest.raises(dt.UsageError, match=r"edited inside optimizer.step\(\)"):
        train(model, optimizer)
    release()


def frozen_ones_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model, optimizer = dt.distribute(model, optimizer, plan="zero2,share", batches="own")
    train(model, optimizer)
    assert [anonymous(p) for p in model.parameters()] == [0] * 4
    release()


def loaded_at_once() -> None:
    """dt.load writes to the memory of all, not to copies."""
    model, optimizer, memory = build("zero2,share")
    train(model, optimizer)
    folder = here().comm.bytes_of_all("folder", tempfile.mkdtemp().encode() if dt.is_main() else b"")[0].decode()
    dt.save(folder)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer)
    dt.load(folder)
    assert memory.memory.edited() == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    release()
    dt.barrier()
    if dt.is_main():
        shutil.rmtree(folder)


def leave_out_the_fence() -> None:
    barrier = Comm.barrier

    def some(self: Comm, name: str = "barrier") -> None:
        if not name.startswith("looked at"):
            barrier(self, name)

    Comm.barrier = some  # type: ignore[method-assign]


if __name__ == "__main__":
    dt.barrier()
    if "sabotage" in sys.argv:
        leave_out_the_fence()
    nobody_looks_while_they_change()
    for plan in ("zero1,share", "zero2,share"):
        once_per_host(plan)
    for check in (edits_inside_a_step_are_refused, frozen_ones_too, loaded_at_once):
        check()
    dt.print("once per host")
