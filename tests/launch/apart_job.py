"""A job whose last process is a server of its own: `apart_job.py FAULT`, in a folder of its own.

Every process writes `pid.<number>` before dt.distribute, and `after.<number>` behind it. `rescue`: workers save when
they are interrupted. A job without a fault ends its group itself, as scripts do.
"""

import os
import sys
from pathlib import Path

import torch
from torch.distributed import destroy_process_group

import distributedtorch as dt

FAULT, NUMBER = sys.argv[1], os.environ["RANK"]
STEPS = 20 if FAULT == "none" else 1_000_000


class Failing(torch.optim.SGD):
    """Steps on servers only, and not for long."""

    taken = 0

    def step(self, closure=None):
        Failing.taken += 1
        if Failing.taken > 5:
            raise ArithmeticError("no more steps")
        return super().step(closure)


torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = (Failing if FAULT == "failing" else torch.optim.SGD)(model.parameters(), lr=0.001)
Path(f"pid.{NUMBER}").write_text(str(os.getpid()))
model, optimizer = dt.distribute(model, optimizer, plan="server(apart)")
Path(f"after.{NUMBER}").touch()


def train() -> None:
    for step in range(1, STEPS * (1 + 4 * dt.rank())):
        model(torch.ones(1, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and dt.is_main():
            print("running", flush=True)
        if step == 9 and FAULT == "raise" and dt.rank() == 1:
            raise ValueError("a bad sample")


try:
    train()
except KeyboardInterrupt:
    if FAULT == "rescue":
        dt.save("rescued")
        print("rescued", flush=True)
    raise
if FAULT == "none":
    print(f"done {dt.rank()} of {dt.world()}", flush=True)
    destroy_process_group()
