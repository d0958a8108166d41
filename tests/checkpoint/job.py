"""A training run that saves and loads: `job.py FOLDER WHAT PLAN`; results go to FOLDER as safetensors."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt

folder, what, plan = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(64, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), 8)
model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler, plan=plan)


def epoch() -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def keep(name: str) -> None:
    state = optimizer.state_dict()["state"]
    tensors = {f"m.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"o.{i}.{k}": v for i, values in state.items() for k, v in values.items()}
    tensors["lr"] = torch.tensor(scheduler.get_last_lr())
    if dt.is_main():
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{name}.safetensors")


if what == "save":
    epoch()
    dt.save(folder / "ckpt")
    keep("saved")
    epoch()
    keep("end")
elif what == "load":
    dt.load(folder / "ckpt")
    keep("loaded")
    epoch()
    keep("end")
elif what == "one rank":
    epoch()
    if dt.is_main():
        dt.save(folder / "ckpt")
    epoch()
elif what == "bad path":
    try:
        dt.save(folder / "file" / "ckpt")
    except dt.CheckpointError as error:
        print(dt.rank(), error)
    epoch()
    print("went on")
elif what == "state of one rank":
    epoch()
    if dt.is_main():
        optimizer.state_dict()
    epoch()
