"""Optimizers and schedulers: made late, forgotten, replaced, grouped in other orders on other ranks."""

from __future__ import annotations

from tests.mistakes.table import Script

LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
TWO_LINES = "model, optimizer, loader = dt.distribute(model, optimizer, loader)\n"
GROUPS = """
named = dict(model.named_parameters())
names = sorted(named)
if dt.rank() % 2:
    names.reverse()  # a set of names: its order differs between processes
decay, rest = [n for n in names if "weight" in n], [n for n in names if "bias" in n]
groups = [{"params": [named[n] for n in decay], "weight_decay": 0.1}, {"params": [named[n] for n in rest], "lr": 0.02}]
"""
STATE = """
numbers = [named[n] for n in decay + rest]  # as optimizer.state_dict() counts: by position in the groups
state = optimizer.state_dict()["state"]
result = {f"{n} {k}": v for i, n in enumerate(decay + rest) for k, v in state[i].items()}
"""
REVERSED = """
params = list(model.parameters())
optimizer = torch.optim.{kind}(params[::-1] if dt.rank() == 1 else params, lr=0.05)
"""

ORDERS = [
    Script(
        name="groups of parameters in another order on every second rank",
        body=GROUPS + "optimizer = torch.optim.AdamW(groups, lr=0.01)\n" + TWO_LINES + LOOP + STATE,
        before="exit 0, weights differ",
        plans=("ddp", "zero1", "zero2", "zero3", "zero2,accumulate=2"),
    ),
    Script(
        name="parameters reversed on one rank",
        body=REVERSED.format(kind="SGD") + TWO_LINES + LOOP,
        before="exit 0, weights differ",
    ),
    Script(
        name="parameters reversed on one rank, for an optimizer that needs them whole",
        body=REVERSED.format(kind="Adafactor") + TWO_LINES + LOOP,
        before="exit 0, weights differ",
    ),
]

SCRIPTS = [
    Script(
        name="the two lines",
        body=TWO_LINES + LOOP,
        before="right",
    ),
    Script(
        name="the optimizer is not over the model's parameters",
        body="model, optimizer = dt.distribute(nn.Linear(2, 2), optimizer)",
        before="refused",
        says=("in no model given",),
    ),
    *ORDERS,
]
