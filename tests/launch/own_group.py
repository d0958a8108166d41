"""A script that makes its own process group and wraps its model in DistributedDataParallel, before the two lines.

Usage: own_group.py OUT PLAN [early|call]. Early: with torch's function as it was before the library was imported. Call:
the workers are asked for by the call, and the group is made where there is a world already.
"""

import os
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt

OUT, PLAN, HOW = [*sys.argv[1:], ""][:3]

if HOW != "call" or "RANK" in os.environ:
    (init_process_group if HOW == "early" else dist.init_process_group)("gloo")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
wrapped = DistributedDataParallel(inner) if dist.is_initialized() else inner
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(26, 8).double(), torch.randn(26, 1).double())
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = dt.distribute(wrapped, optimizer, loader, plan=PLAN, workers=2 if HOW == "call" else None)
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
