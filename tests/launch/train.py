"""A plain training script with the two lines, started in every way there is; rank 0 leaves the weights.

Usage: train.py OUT [WORKERS]
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt


def train(out: str, workers: int | None = None) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(26, 8).double(), torch.randn(26, 1).double())
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = dt.distribute(model, optimizer, loader, workers=workers)
    for _ in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    last = dt.mean(loss.item())
    dt.print("world", dt.world())
    weights = model.state_dict()
    if dt.is_main():
        save_file(weights, out)
    return last


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
