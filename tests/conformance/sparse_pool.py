"""What each process of a pool runs: what travels and changes of a table, and who keeps its state. A fault raises."""

from __future__ import annotations

import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.distribute import release

ROWS, WIDTH, STEPS = 300, 8, 3


def only_used_rows_travel_and_change(plan: str) -> None:
    torch.manual_seed(1)
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    table, optimizer = dt.distribute(table, optimizer, plan=plan, batches="own")
    ids = torch.tensor([dt.rank(), dt.rank(), 100, 200 + dt.rank()])  # three rows here, one of them everywhere
    union = 1 + 2 * dt.world()
    dt.barrier()
    sent = dt.stats().bytes_sent.get("all-gather", 0)
    for _ in range(STEPS):
        table(ids).square().mean().backward()
        assert table.weight.grad is not None and table.weight.grad.indices().numel() == union
        optimizer.step()
        optimizer.zero_grad()
    sent = dt.stats().bytes_sent["all-gather"] - sent
    others, row = dt.world() - 1, WIDTH * 8
    gradients = STEPS * others * 3 * (row + 8)
    mine = range(ROWS * dt.rank() // dt.world(), ROWS * (dt.rank() + 1) // dt.world())
    used = {row for rank in range(dt.world()) for row in (rank, 100, 200 + rank)}
    updated = 0 if plan == "ddp" else STEPS * others * row * sum(number in mine for number in used)
    assert sent == gradients + updated, (sent, gradients, updated)
    changed = (table.weight.detach() != before).any(1).nonzero().view(-1).tolist()
    assert changed == sorted(used)
    state = optimizer.state[table.weight]["exp_avg"]
    assert len(state) == (ROWS if plan == "ddp" else len(mine))
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (ROWS, WIDTH)
    release()


if __name__ == "__main__":
    dt.barrier()
    torch.set_default_dtype(torch.float64)
    for plan in ("ddp", "zero1", "zero3"):
        only_used_rows_travel_and_change(plan)
