"""Loss of a GPT of 3M parameters under every wire, and under plans whose replicas step alone, beside ddp.

Two ranks, the same rows of a made-up language for every plan, AdamW with a warm-up and a cosine decay to a twentieth;
the loss at the end, after `dt.sync()`, on rows that nobody is trained on. Twins with error feedback switched off show
what it is worth. `python -m benchmarks.convergence [--plans TEXT ...] [--seeds 1] [--steps 600] [--optimizer sgd]
[--lr 0.1 ...] [--device cuda] [--lanes 1] [--out FILE]` writes benchmarks/results/convergence.json; known rows of the
same commit are kept. `--lanes`: how many jobs at a time; no figure here is a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import distributedtorch as dt
from benchmarks.language import HELD_OUT, Language
from benchmarks.step_time import ROOT, Gpt, machine
from distributedtorch.core.world import here
from distributedtorch.wire.feedback import Coded
from distributedtorch.wire.powersgd import PowerSgd

MODEL = {"layers": 4, "d": 192, "vocabulary": 4096, "length": 64}
BATCH, WARM_UP, LEAST = 8, 50, 0.05
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
RATES = {"adamw": 1e-3, "sgd": 0.1}
WIRES = ("bf16", "fp16", "int8", "int4", "int2", "sign", "topk(0.01)", "randomk(0.05)", "powersgd(rank=4)")
FORGETS = "without feedback: "
PLANS = (
    "ddp",
    *(f"ddp,wire={wire}" for wire in WIRES),
    "zero1,wire=int8",
    "local(every=16),wire=topk(0.05)",
    "diloco(every=50),wire=int8",
    *(f"{FORGETS}ddp,wire={wire}" for wire in WIRES[3:]),
)
RESULT = ROOT / "benchmarks/results/convergence.json"


def inside(plan: str, seed: int, steps: int, kind: str, lr: float) -> None:
    torch.set_num_threads(1)
    if plan.startswith(FORGETS):
        forget()
    torch.manual_seed(seed)
    device = os.environ.get("BENCHMARK_DEVICE", "cpu")
    model: Any = Gpt(**MODEL).to(device)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=lr)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    model, optimizer, rates = dt.distribute(model, optimizer, rates, plan=plan.removeprefix(FORGETS))
    language = Language(MODEL["vocabulary"])

    def loss(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(device)
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    losses, length = [], MODEL["length"] + 1
    for step in range(steps):
        rows = language.rows(steps * seed + step, BATCH * dt.world(), length)
        loss(rows[BATCH * dt.rank() : BATCH * (dt.rank() + 1)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if step >= steps - 1:
            dt.sync()
            with torch.no_grad():
                losses.append(loss(language.rows(HELD_OUT, 128, length)).item())
    sent = sum(t.bytes_sent for t in here().comm.traffic.values())
    if dt.is_main():
        row = {"plan": plan, "seed": seed, "steps": steps, "optimizer": kind, "lr": lr, "loss": losses[-1]}
        print("ROW " + json.dumps({**row, "bytes per step": round(sent / steps)}), flush=True)


def forget() -> None:
    """What codes leave out is lost."""
    for kind, name in ((Coded, "reduced"), (PowerSgd, "add_left")):
        kept = getattr(kind, name)
        setattr(kind, name, lambda self, key, *given, kept=kept: (self.left.pop(key, None), kept(self, key, *given))[1])


def rate(step: int, steps: int) -> float:
    """The learning rate at a step, as part of the largest."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def run(plan: str, seed: int, steps: int, kind: str, lr: float, *, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", "-m", "benchmarks.convergence"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "BENCHMARK_DEVICE": device}
    words = ["--inside", plan, "--seeds", str(seed), "--steps", str(steps), "--optimizer", kind, "--lr", str(lr)]
    ended = subprocess.run([*command, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    row = {"plan": plan, "seed": seed, "steps": steps, "optimizer": kind, "lr": lr, "failed": ended.stderr[-500:]}
    return dict(json.loads(found[0][4:])) if found else row


def known(path: Path, device: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    same = (stored["machine"]["commit"], stored["machine"]["device"]) == (machine()["commit"], device)
    return [row for row in stored["rows"] if "loss" in row] if same else []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", nargs="+", type=float, help="the largest; by default 0.001 for adamw, 0.1 for sgd")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    kind, rates = given.optimizer, given.lr or [RATES[given.optimizer]]
    if given.inside:
        inside(given.inside, given.seeds, given.steps, kind, *rates)
        return 0
    rows = known(given.out, given.device)
    have = {(row["plan"], row["seed"], *_kind(row), row["lr"]) for row in rows if "loss" in row}
    seeds = range(given.seeds)
    wanted = [(plan, seed, given.steps, kind, lr) for seed in seeds for plan in given.plans for lr in rates]
    with ThreadPoolExecutor(given.lanes) as lanes:
        jobs = [lanes.submit(run, *one, device=given.device) for one in wanted if one not in have]
        for job in as_completed(jobs):
            rows.append(job.result())
            print(rows[-1], flush=True)
            where = {**machine(), "device": given.device}
            given.out.write_text(json.dumps({"machine": where, "rows": rows, "table": table(rows)}, indent=1))
    for line in table(rows):
        print(line)
    return sum("failed" in row for row in rows)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By plan, steps, optimizer and its rate: mean loss over seeds, over ddp's best of the same seeds, and bytes."""
    found = []
    there = [row for row in rows if "loss" in row]
    ddp = sorted(
        (row for row in there if row["plan"] == "ddp" and math.isfinite(row["loss"])), key=lambda r: -r["loss"]
    )
    plain = {(row["seed"], *_kind(row)): row for row in ddp}
    for plan, kind, lr in dict.fromkeys((row["plan"], _kind(row), row["lr"]) for row in there):
        alike = [r for r in there if (r["plan"], _kind(r), r["lr"]) == (plan, kind, lr)]
        mine = [row for row in alike if (row["seed"], *kind) in plain]
        if mine:
            base = [plain[row["seed"], *kind] for row in mine]
            ratios = [a["loss"] / b["loss"] for a, b in zip(mine, base, strict=True)]
            one = {"plan": plan, "steps": kind[0], "optimizer": kind[1], "lr": lr, "seeds": len(mine)}
            one |= {"loss": round(statistics.mean(row["loss"] for row in mine), 4)}
            one |= {"to ddp": round(statistics.mean(ratios), 4), "largest": round(max(ratios), 4)}
            found.append({**one, "times less sent": round(base[0]["bytes per step"] / mine[0]["bytes per step"], 1)})
    return found


def _kind(row: dict[str, Any]) -> tuple[int, str]:
    return row["steps"], row["optimizer"]


if __name__ == "__main__":
    sys.exit(main())
