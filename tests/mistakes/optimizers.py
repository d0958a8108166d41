"""Optimizers and schedulers: made late, forgotten, grouped in other orders."""

from __future__ import annotations

from tests.mistakes.table import Script

LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

SCRIPTS = [
    Script(
        name="the two lines",
        body="model, optimizer, loader = dt.distribute(model, optimizer, loader)" + LOOP,
        before="right",
    ),
    Script(
        name="the optimizer is not over the model's parameters",
        body="model, optimizer = dt.distribute(nn.Linear(2, 2), optimizer)",
        before="refused",
        says=("in no model given",),
    ),
]
