"""Kills and resumes: `python benchmarks/resume.py [--kills 50] [--seed 0]` writes benchmarks/results/resume.json.

exact     a job killed at a random moment (one rank or all) and started again: every step it takes again, and the end,
          are compared to an undisturbed run of the same plan and world, to the bit (tests/checkpoint/resumed.py).
moving    one training through 10 kills and changes of world: no sample lost or repeated in any epoch, the same global
          batches in the same order as one undisturbed process, the global losses within 1e-9 (float64).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import machine  # noqa: E402

CASES = ((1, "ddp"), (2, "zero1"), (2, "zero3"), (3, "zero2"), (3, "zero3"), (4, "ddp"))
EPOCHS = 12
STEPS = 6 * EPOCHS
MOVES = (2, 2, 2, 2, 3, 3, 3, 3, 1, 1, 2)
"""Number of ranks before each of 10 kills, and at last."""


def start(folder: Path, world: int, plan: str, dropout: float) -> subprocess.Popen[bytes]:
    for file in folder.glob("pid.*"):
        file.unlink()
    script = [str(ROOT / "tests/checkpoint/resumed.py"), str(folder), plan, str(EPOCHS), str(dropout)]
    command = [
        sys.executable,
        *(["-m", "distributedtorch", "run", "--workers", str(world)] if world > 1 else []),
        *script,
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = (folder / "out").open("ab")
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)


def lines(folder: Path, world: int) -> int:
    file = folder / f"log.{world}.0"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill(job: subprocess.Popen[bytes], folder: Path, world: int, draw: random.Random, after: int) -> str:
    """Kill one rank, or all, at a random moment after some more steps; the job has ended when this returns."""
    began = lines(folder, world)
    while lines(folder, world) < began + after and job.poll() is None:
        time.sleep(0.001)
    time.sleep(draw.random() * 0.02)
    ranks = range(world) if draw.random() < 0.5 else [draw.randrange(world)]
    for rank in ranks:
        file = folder / f"pid.{rank}"
        if file.exists() and job.poll() is None:
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
    job.wait(timeout=60)
    return "all" if len(ranks) == world else f"rank {ranks[0]}"


def finished(folder: Path, world: int, plan: str, dropout: float) -> tuple[str, dict[int, dict[int, set[str]]]]:
    """Run to the end; its hash, and by rank and step what was logged."""
    code = start(folder, world, plan, dropout).wait(timeout=120)
    if code:
        raise RuntimeError((folder / "out").read_text()[-3000:])
    return (folder / "end").read_text(), logged(folder, world)


def logged(folder: Path, world: int) -> dict[int, dict[int, set[str]]]:
    found: dict[int, dict[int, set[str]]] = {}
    for rank in range(world):
        steps: dict[int, set[str]] = defaultdict(set)
        for line in (folder / f"log.{world}.{rank}").read_text().splitlines():
            if line.count("0x") == 2:  # not cut by a kill
                steps[int(line.split()[0])].add(line)
        found[rank] = dict(steps)
    return found


def exact(kills: int, draw: random.Random) -> list[dict[str, Any]]:
    truths, rows = {}, []
    for trial in range(kills):
        world, plan = CASES[trial % len(CASES)]
        if (world, plan) not in truths:
            with tempfile.TemporaryDirectory() as name:
                truths[world, plan] = finished(Path(name), world, plan, 0.3)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            job = start(folder, world, plan, 0.3)
            victim = kill(job, folder, world, draw, draw.randrange(1, STEPS - 2))
            at = lines(folder, world)
            end, seen = finished(folder, world, plan, 0.3)
            said = (folder / "out").read_text()
        truth, steps = truths[world, plan]
        same = end == truth and all(
            some == steps[rank][step] for rank, found in seen.items() for step, some in found.items()
        )
        resumed = "resumed from" in said
        rows.append({"world": world, "plan": plan, "killed": victim, "at": at, "resumed": resumed, "same": same})
        print(rows[-1], flush=True)
    return rows


def moving(draw: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        _, truth = finished(Path(name), 1, "ddp", 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder, taken = Path(name), {}
        for number, world in enumerate(MOVES):
            plan = ("ddp", "zero1", "zero3", "zero2")[number % 4]
            for file in folder.glob("log.*"):
                file.unlink()
            job = start(folder, world, plan, 0.0)
            if number < len(MOVES) - 1:
                kill(job, folder, world, draw, 6)
            elif job.wait(timeout=120):
                raise RuntimeError((folder / "out").read_text()[-3000:])
            seen = logged(folder, world)
            full = [step for step in seen[0] if all(step in seen[rank] for rank in range(world))]
            for step in full:  # a step that was lost with the kill is taken again later: the last one counts
                taken[step] = [next(iter(seen[rank][step])) for rank in range(world)]
    losses, orders, epochs = [], 0, defaultdict(Counter)
    for step, ranks in taken.items():
        one = next(iter(truth[0][step]))
        ids = [number for line in ranks for number in json.loads(line[line.index("[") : line.index("]") + 1])]
        orders += ids != json.loads(one[one.index("[") : one.index("]") + 1])
        epochs[int(ranks[0].split()[1])].update(ids)
        mine, theirs = float.fromhex(ranks[0].split()[-1]), float.fromhex(one.split()[-1])
        losses.append(abs(mine - theirs) / abs(theirs))
    wrong = [epoch for epoch, seen in epochs.items() if seen != Counter(range(45))]
    found = {"worlds": MOVES, "kills": len(MOVES) - 1, "steps": len(taken), "batches in another order": orders}
    return {
        **found,
        "epochs with a sample lost or repeated": wrong,
        "epochs": len(epochs),
        "losses differ by": max(losses),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    moved = moving(draw)
    print(moved, flush=True)
    rows = exact(given.kills, draw)
    same = sum(row["same"] for row in rows)
    resumed = sum(row["resumed"] for row in rows)
    print(
        f"{same} of {len(rows)} killed runs equal the undisturbed one to the bit, {resumed} resumed from a checkpoint"
    )
    results = {"machine": machine(), "seed": given.seed, "exact": rows, "same": same, "moving": moved}
    (ROOT / "benchmarks/results/resume.json").write_text(json.dumps(results, indent=1))
    good = moved["losses differ by"] <= 1e-9 and not moved["batches in another order"] and moved["steps"] == STEPS
    bad = moved["epochs with a sample lost or repeated"]
    return len(rows) - same + (not good) + len(bad)


if __name__ == "__main__":
    sys.exit(main())
