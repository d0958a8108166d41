"""A process of a job over two hosts, the server on the second, that trains until there is a file `stop`.

Workers count their steps in `steps.<rank>`. What waits for long waits for less here.
"""

import os
from pathlib import Path

import torch

import distributedtorch as dt
from distributedtorch.serve import channel

channel._SECONDS_ALONE, channel._SECONDS_TO_ANSWER, channel._HEARTBEAT_MS = 5.0, 3.0, 500
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer = dt.distribute(model, optimizer, plan="server(apart,staleness=4)")
count = os.open(f"steps.{dt.rank()}", os.O_WRONLY | os.O_CREAT, 0o600)
step = 0
while not Path("stop").exists():
    model(torch.ones(1, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    os.pwrite(count, str(step).encode(), 0)
