"""A rank that takes more and more memory, step by step: `-m tests.launch.reserve_job MIB`."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import distributedtorch as dt


def main(most: int) -> None:
    model, kept = torch.nn.Linear(8, 4), []
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(8):
        if dt.rank() == dt.world() - 1:
            kept.append(torch.ones(most // 8 << 20, dtype=torch.uint8))
        F.mse_loss(model(torch.ones(2, 8)), torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dt.print(f"step {step}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
