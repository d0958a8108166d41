"""A script that makes its own process group and wraps its model in DistributedDataParallel, before the two lines.

Usage: own_group.py OUT PLAN
"""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt

OUT, PLAN = sys.argv[1:]

dist.init_process_group("gloo")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
wrapped = DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(26, 8).double(), torch.randn(26, 1).double())
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = dt.distribute(wrapped, optimizer, loader, plan=PLAN)
assert model is inner
for _ in range(3):
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
weights = model.state_dict()
if dt.is_main():
    save_file(weights, OUT)
dist.destroy_process_group()
