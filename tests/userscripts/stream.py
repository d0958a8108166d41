#!/usr/bin/env python
"""Regression on a generated stream of samples."""
import argparse
import time
from typing import Iterator, Tuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

LOG_EVERY = 20
VAL_EVERY = 50


class SensorStream(IterableDataset):
    """Finite stream; sample i only depends on (seed, i), so workers can split it by index."""

    def __init__(self, length: int, seed: int, n_features: int = 8):
        super().__init__()
        self.length = length
        self.seed = seed
        self.n_features = n_features

    def __iter__(self) -> Iterator[Tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.length, stride):
            rng = np.random.default_rng([self.seed, i])
            x = rng.uniform(-1.0, 1.0, self.n_features)
            y = np.sin(3.0 * x[0]) + x[1] * x[2] - 0.5 * x[3] ** 2 + 0.02 * rng.standard_normal()
            yield (torch.tensor(x, dtype=torch.get_default_dtype()),
                   torch.tensor([y], dtype=torch.get_default_dtype()))


class MLP(nn.Module):
    def __init__(self, d_in: int, d_hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.fc2 = nn.Linear(d_hidden, d_hidden)
        self.norm = nn.LayerNorm(d_hidden)
        self.out = nn.Linear(d_hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        h = h + F.gelu(self.fc2(h))
        return self.out(self.norm(h))


def grad_norm(model: nn.Module) -> float:
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.detach().norm(2).item() ** 2
    return total ** 0.5


def validate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    se, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            se += F.mse_loss(model(x), y, reduction="sum").item()
            n += y.shape[0]
    model.train()
    return se / n


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", required=True, help="where to save the weights")
    ap.add_argument("--double", action="store_true", help="use float64")
    ap.add_argument("--num-workers", type=int, default=0)
    ap.add_argument("--samples", type=int, default=6400)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()

    torch.manual_seed(7)
    if args.double:
        torch.set_default_dtype(torch.float64)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(SensorStream(args.samples, seed=1), batch_size=args.batch_size,
                              num_workers=args.num_workers)
    val_loader = DataLoader(SensorStream(500, seed=2), batch_size=100, num_workers=args.num_workers)

    model = MLP(8, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    t0 = time.time()
    model.train()
    for step, (x, y) in enumerate(train_loader, start=1):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if step % LOG_EVERY == 0:
            print(f"[{time.time() - t0:5.1f}s] step {step:4d}  loss {loss.item():.5f}  |g| {grad_norm(model):.4f}")
        optimizer.step()
        if step % VAL_EVERY == 0:
            print(f"          validation mse {validate(model, val_loader, device):.5f}")

    print(f"final validation mse {validate(model, val_loader, device):.5f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
