"""Unequal ranks: rows per second with equal rows and with rows by speed, as part of what the ranks could do together.

Two ranks; a row takes rank 0 4 ms and rank 1 8 ms (a sleep, so that speeds are exact whatever the machine does), and a
batch has 48 rows. Together they could do 375 rows a second; with equal rows the fast rank waits a third of that away.
Rounds of 4 steps; between two barriers each. `python benchmarks/balance.py [--rounds 40]` prints and writes
benchmarks/results/balance.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import interval, machine  # noqa: E402

PLANS = ("ddp", "ddp,balance", "ddp,balance(static)")
SECONDS = (0.004, 0.008)
"""For one row, by rank."""
BATCH, STEPS = 48, 4
WARM = 24
"""Steps before the first round: the probe and two looks at the speeds."""


class Timed(nn.Module):
    """A small model whose rows take a known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.net = seconds, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.seconds)
        out: Tensor = self.net(x)
        return out


def measure(rounds: int) -> None:
    import distributedtorch as dt
    from distributedtorch.distribute import release

    torch.set_num_threads(1)
    dt.barrier()
    result: dict[str, Any] = {}
    for plan in PLANS:
        torch.manual_seed(0)
        model = Timed(SECONDS[dt.rank()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = WARM + rounds * STEPS
        data = TensorDataset(torch.randn(BATCH * steps, 16))
        model, optimizer, loader = dt.distribute(model, optimizer, DataLoader(data, BATCH), plan=plan)
        seconds, rows, began = [], 0, 0.0
        for number, (x,) in enumerate(loader):
            if (number - WARM) % STEPS == 0 and number >= WARM:
                dt.barrier()
                now = time.perf_counter()
                if number > WARM:
                    seconds.append(now - began)
                began = now
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows = len(x)
        dt.barrier()
        seconds.append(time.perf_counter() - began)
        result[plan] = {"seconds": seconds, "rows": rows, "shares": dt.stats().shares}
        release()
    if dt.is_main():
        print("RESULT " + json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return measure(given.rounds)
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", __file__, "--inside"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command += ["--rounds", str(given.rounds)]
    out = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    together = sum(1 / seconds for seconds in SECONDS)
    table = {}
    for plan, found in result.items():
        part = interval([BATCH * STEPS / seconds / together for seconds in found["seconds"]])
        table[plan] = {"part of the sum of speeds": part, "rows of rank 0": found["rows"], "shares": found["shares"]}
        said = f"rank 0 takes {found['rows']} of {BATCH} rows"
        print(
            f"{plan:22} {100 * part[0]:5.1f}% [{100 * part[1]:.1f}, {100 * part[2]:.1f}] of the sum of speeds, {said}"
        )
    setting = {"seconds per row": SECONDS, "batch": BATCH, "steps per round": STEPS, "rounds": given.rounds}
    stored = {
        "machine": machine(),
        **setting,
        "table": table,
        "rounds in seconds": {p: f["seconds"] for p, f in result.items()},
    }
    (ROOT / "benchmarks/results/balance.json").write_text(json.dumps(stored, indent=1))


if __name__ == "__main__":
    main()
