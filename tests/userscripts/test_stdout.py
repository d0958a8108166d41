"""A script that prints a test accuracy computed by hand prints the same at every number of workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import forked

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distributedtorch as dt
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(333, 8)
y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(TensorDataset(x[:250], y[:250]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(x[250:], y[250:]), batch_size=10)
model, optimizer, train = dt.distribute(model, optimizer, train)
for epoch in range(3):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for a, b in test:
            right += (model(a).argmax(1) == b).sum().item()
            seen += len(b)
    print(f"epoch {epoch}: accuracy {right / seen:.4f} ({right} of {seen})")
print("done")
"""


def test_standard_output_is_that_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = [sys.executable, str(script)]
    alone = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    said = [alone.stdout]
    for workers in (2, 3):
        ended = forked.run(workers, str(script), cwd=tmp_path, environ={"DISTRIBUTEDTORCH_PLAN": "zero1"})
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
    assert said[0].count("\n") == 4 and len(set(said)) == 1
