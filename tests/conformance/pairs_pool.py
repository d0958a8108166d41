"""What each process of a pool runs: words whose result is not that of one process, each with every word it goes with.

Equality with their algorithms is tested by other pools; here every pair must train, and leave replicas the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.menu import pairs
from tests.conformance.loops import adam, rows

TEXTS = {
    "local": "local(every=2)",
    "diloco": "diloco(every=2)",
    "server": "server(staleness=1)",
    "groups": "groups(every=2)",
    "accumulate": "accumulate=2",
    "batch": "batch=4",
    "clip": "clip=0.05",
    "delay": "delay=1",
    "block": "block=Linear",
    "wire=topk": "wire=topk(0.1)",
    "wire=randomk": "wire=randomk(0.1)",
    "wire=powersgd": "wire=powersgd(rank=1)",
}
NEW = {"local", "diloco", "gossip", "server", "groups", "delay"}


def train(plan: str) -> None:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 130), nn.Tanh(), nn.Linear(130, 3))
    before = [param.detach().clone() for param in model.parameters()]
    model, optimizer, data = dt.distribute(model, adam(model), rows(), plan=plan)
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    every_one = here().comm.exchange("found", flat)
    assert torch.isfinite(flat).all() and not torch.equal(flat, torch.cat([t.reshape(-1) for t in before])), plan
    assert (every_one == every_one[0]).all(), f"{plan}: replicas differ"
    release()


def plans() -> list[str]:
    """Every pair with such a word that the table says works; `share` and `fp8` have tests of their own."""
    found = []
    for left, right, verdict in pairs():
        new = any(name in NEW or name.startswith("wire=") for name in (left, right))
        if new and verdict.startswith("works") and not {"share", "fp8", "zero3"} & {left, right}:
            found.append(",".join(TEXTS.get(name, name) for name in (left, right)))
    return found


def main() -> None:
    torch.set_num_threads(1)
    every_plan = plans()
    assert len(set(every_plan)) == len(every_plan) > 60
    for plan in every_plan:
        train(plan)
    dt.print(f"{len(every_plan)} pairs train")


if __name__ == "__main__":
    dt.barrier()
    main()
