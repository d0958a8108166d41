"""A process of a job over two hosts, the server on the second, that trains until there is a file `stop`.

Each worker has a number, and takes one off it with every step: so it says how often its pushes were applied. Workers
write their steps into `steps.<rank>`, at the end both into `end.<rank>`, and leave when there is a file `leave`. What
waits for long waits for less here.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.serve import channel

channel._SECONDS_ALONE, channel._SECONDS_TO_ANSWER, channel._HEARTBEAT_MS = 12.0, 8.0, 500
channel._SECONDS_TO_REPORT = 0.5


class Counting(nn.Module):
    """One number per worker."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(2))

    def forward(self, rank: int) -> torch.Tensor:
        return -self.counts[rank]


model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = dt.distribute(model, optimizer, plan="server(apart,staleness=4)")
count = os.open(f"steps.{dt.rank()}", os.O_WRONLY | os.O_CREAT, 0o600)
step = 0
while not Path("stop").exists():
    model(dt.rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    os.pwrite(count, str(step).encode(), 0)
dt.sync()
Path(f"end.{dt.rank()}").write_text(f"{step} {model.counts[dt.rank()].item():g}")
while not Path("leave").exists():
    time.sleep(0.01)
