"""A job that loads a value after dt.distribute, and is killed `before` or `after` its first two pushes."""

import os
import signal
import sys

import torch

import distributedtorch as dt

first = os.environ["DISTRIBUTEDTORCH_ATTEMPT"] == "0"
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = dt.distribute(model, optimizer, plan="server(staleness=0)")
model.load_state_dict({"weight": torch.tensor([[7.0]])})
for _ in range(2 if first and sys.argv[1] == "after" else 0):
    (-model(torch.ones(1, 1))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if first:
    dt.barrier()
    if sys.argv[1] == "before" or dt.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dt.barrier()
dt.sync()
if dt.is_main():
    print(model.weight.item())
