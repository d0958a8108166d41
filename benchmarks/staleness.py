"""Parameter servers: no push beyond the bound, and what a bound is worth where one rank is slow.

Bound: workers with random pauses push to a server over its real channel until so many pushes were applied; its history
is looked at by a checker that knows nothing of it (tests/serve/history.py). Speed: two ranks, one four times slower (a
pause in place of computing), rounds beside a staleness of 8: pushes per second, and the loss by time.
`python -m benchmarks.staleness [--pushes 100000] [--steps 500]` writes benchmarks/results/staleness.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distributedtorch as dt
from benchmarks.step_time import ROOT, machine
from distributedtorch.core.world import here
from distributedtorch.serve.board import Event
from distributedtorch.sync.server import Server
from tests.serve.history import staleness

FAST, SLOW = 0.02, 0.08
BOUND = 8


def served() -> Server:
    sync = here().loop.members[0].sync
    assert isinstance(sync, Server)
    return sync


def loss_of(model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    x = torch.randn(16, 8, generator=draw)
    return (model(x) - x[:, :3].sin()).square().mean()


def bound(pushes: int, most: int) -> dict[str, Any] | None:
    """Push until the server has applied so many."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = dt.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), plan=f"server(staleness={most})"
    )
    events: list[Event] = []
    sync, draw, data = served(), random.Random(dt.rank()), torch.Generator().manual_seed(dt.rank())
    if sync.desk is not None:
        sync.desk.board.note = events.append
    dt.barrier()
    began = time.monotonic()
    while sync.lines[0].version < pushes:
        loss_of(model, data).backward()
        if draw.random() < 0.01:
            time.sleep(draw.random() * 0.01)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.monotonic() - began
    dt.sync()
    if sync.desk is None:
        return None
    late = Counter(staleness(events))
    row = {"bound": most, "ranks": dt.world(), "pushes applied": sync.desk.board.version}
    found = {
        "beyond the bound": sum(n for s, n in late.items() if s > most),
        "by staleness": dict(sorted(late.items())),
    }
    return {**row, **found, "pushes per second": round(sync.desk.board.version / seconds, 1)}


def speed(plan: str, steps: int, folder: Path) -> dict[str, Any] | None:
    """The slow rank takes so many steps; the other as many as it comes to, or as many under rounds."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), plan=plan)
    slow, ended = dt.rank() == 1, folder / "ended"
    data, held_out = torch.Generator().manual_seed(dt.rank()), torch.Generator()
    losses: list[tuple[float, float]] = []
    dt.barrier()
    began, taken = time.monotonic(), 0
    while taken < steps or ("=0" not in plan and not slow and not ended.exists()):
        loss_of(model, data).backward()
        time.sleep(SLOW if slow else FAST)
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if taken % 25 == 0 and not slow:
            with torch.no_grad():
                losses.append((time.monotonic() - began, loss_of(model, held_out.manual_seed(99)).item()))
    if slow:
        ended.touch()
    seconds = time.monotonic() - began
    pushes = dt.total(taken)
    row = {
        "plan": plan,
        "pushes": pushes,
        "seconds": round(seconds, 2),
        "pushes per second": round(pushes / seconds, 2),
    }
    return {**row, "loss by seconds": [(round(t, 1), round(v, 5)) for t, v in losses]} if dt.is_main() else None


def run(ranks: int, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), "-m", "benchmarks.staleness"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    return dict(json.loads(found[0][4:])) if found else {"failed": ended.stderr[-800:]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pushes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        torch.set_num_threads(1)
        what, *words = given.inside
        row = bound(int(words[0]), int(words[1])) if what == "bound" else speed(words[0], int(words[1]), Path(words[2]))
        if row is not None:
            print("ROW " + json.dumps(row), flush=True)
        return 0
    rows = []
    for ranks, most, part in ((4, 2, 0.5), (3, BOUND, 0.5)):
        rows.append(run(ranks, "--inside", "bound", str(int(given.pushes * part)), str(most)))
        print(rows[-1], flush=True)
    speeds = []
    for plan in ("server(staleness=0)", f"server(staleness={BOUND})", "server"):
        with tempfile.TemporaryDirectory() as folder:
            speeds.append(run(2, "--inside", "speed", plan, str(given.steps), folder))
        print({key: value for key, value in speeds[-1].items() if key != "loss by seconds"}, flush=True)
    failed = sum("failed" in row for row in rows + speeds)
    ratio = None if failed else speeds[1]["pushes per second"] / speeds[0]["pushes per second"]
    beyond = sum(row.get("beyond the bound", 1) for row in rows)
    print(f"{beyond} pushes beyond the bound; staleness={BOUND} over rounds: {ratio} (limit {(1 + SLOW / FAST) / 2:g})")
    result = {"machine": machine(), "bound": rows, "one rank four times slower": speeds, "ratio": ratio}
    (ROOT / "benchmarks/results/staleness.json").write_text(json.dumps(result, indent=1))
    return failed + bool(beyond)


if __name__ == "__main__":
    sys.exit(main())
