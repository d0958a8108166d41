"""What a row of the table of scripts says, and the rows of all topics together."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

HEAD = """
import random
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
torch.manual_seed(0)
random.seed(0)
xs, ys = torch.randn(20, 4), torch.randint(0, 3, (20,))
data = TensorDataset(xs, ys)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=5, shuffle=True)
"""
"""What stands above every script: float64 is the default type."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script, and what it must come to."""

    name: str
    body: str
    """The script below `HEAD`; the library is `dt`. It leaves what it has trained in `model`, or its numbers (a dict of
    tensors or numbers, compared too) in `result`."""
    before: str
    """What came of it when it was first tried."""
    says: tuple[str, ...] = ()
    """Fragments of the refusal; none: every rank ends with the result of one process."""
    plans: tuple[str, ...] = ("ddp", "zero2", "zero3")
    worlds: tuple[int, ...] = (2, 3)
    alone: bool = False
    """Ends its processes, or is refused on some ranks only: it gets processes of its own, under its first plan."""
    head: bool = True

    @property
    def text(self) -> str:
        return (HEAD if self.head else "") + textwrap.dedent(self.body)


def scripts() -> list[Script]:
    """All rows: the lists `SCRIPTS` of this folder's modules."""
    found: list[Script] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found += getattr(importlib.import_module(f"tests.mistakes.{module.name}"), "SCRIPTS", [])
    return found
