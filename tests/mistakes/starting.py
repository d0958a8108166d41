"""Ranks that decide by themselves, and what one of them does first."""

from __future__ import annotations

from tests.mistakes.table import Script

SCRIPTS = [
    Script(
        name="a loop that one rank wants to leave",
        body="""
        model, optimizer, loader = dt.distribute(model, optimizer, loader)
        for step, (x, y) in enumerate(loader):
            if dt.any(dt.rank() == dt.world() - 1 and step == 2):
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
        before="right",
    ),
    Script(
        name="a step inside main_first",
        body="""
        model, optimizer, loader = dt.distribute(model, optimizer, loader)
        with dt.main_first():
            scale = 0.5
        for x, y in loader:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
        """,
        before="right",
    ),
]
