"""A training that writes down all it does: `resumed.py FOLDER PLAN EPOCHS DROPOUT [SAVE_EVERY]`.

Every rank appends a line per step to FOLDER/log.<world>.<rank>: step, epoch, the samples it was given, its loss to the
last bit. At the end rank 0 writes a hash of the whole state to FOLDER/end.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.core.world import here


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> str:
    """One number for every bit of the state; a group call."""
    found = hashlib.sha256()
    state = optimizer.state_dict()
    tensors = {f"m.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"o.{i}.{k}": v for i, values in state["state"].items() for k, v in values.items()}
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(repr([group["lr"] for group in state["param_groups"]]).encode())
    found.update(repr(sorted(scheduler.state_dict().items())).encode())  # type: ignore[attr-defined]
    return found.hexdigest()


def main() -> None:
    folder, plan, epochs, dropout = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    every, device = int(sys.argv[5]) if len(sys.argv) > 5 else 3, os.environ.get("DEVICE", "cpu")
    torch.manual_seed(3)
    x = torch.randn(45, 6, dtype=torch.float64)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    model = Net(dropout).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.97)
    loader = DataLoader(TensorDataset(torch.arange(45), x, y), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler, plan=plan)
    resumed = dt.resume(os.environ.get("CHECKPOINTS", folder / "checkpoints"), save_every=every)
    (folder / f"pid.{dt.rank()}").write_text(str(os.getpid()))
    log = (folder / f"log.{dt.world()}.{dt.rank()}").open("a")
    for epoch in range(resumed.epoch, epochs):
        for number, rows, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen = [] if here().loop.idle else number.tolist()
            mean = dt.mean(loss.detach())
            log.write(f"{here().loop.steps} {epoch} {seen} {loss.item().hex()} {float(mean).hex()}\n")
            log.flush()
    end = state_hash(model, optimizer, scheduler)
    if dt.is_main():
        (folder / "end").write_text(f"{end} {here().loop.steps}")


if __name__ == "__main__":
    main()
