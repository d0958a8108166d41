"""Bytes of every pair of a sync and a wire, by the interface, beside what the wire says of itself.

Two ranks on the loopback of a network namespace of their own (needs root), a GPT of 27M parameters; sent per step and
rank over what the same plan would send without the wire. `python -m benchmarks.wire_bytes` writes
benchmarks/results/wire_bytes.json; more than 2% from the stated ratio counts as a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import distributedtorch as dt
from benchmarks.memory_wire import MIB, alone, counters
from benchmarks.step_time import ROOT, Gpt, machine
from distributedtorch.core.plan import Plan
from distributedtorch.core.wire import SMALL
from distributedtorch.core.world import here
from distributedtorch.menu import pairs
from distributedtorch.wire.quantize import INT8_BLOCK, SIGN_BLOCK

STEPS, EVERY, RATIO, RANK = 4, 2, 0.01, 4
TEXTS = {
    **{name: f"{name}(every={EVERY})" for name in ("local", "diloco", "groups", "gossip")},
    **{f"wire={name}": f"wire={name}({RATIO})" for name in ("topk", "randomk")},
    "wire=powersgd": f"wire=powersgd(rank={RANK})",
    "server": "server(staleness=0)",
}


def plans() -> list[tuple[str, str]]:
    """Every sync with every wire that the table allows."""
    found = []
    for left, right, verdict in pairs():
        if right.startswith("wire=") and verdict.startswith("works") and Plan.parse(TEXTS.get(left, left)).sync == left:
            found.append((TEXTS.get(left, left), TEXTS.get(right, right)))
    return found


def stated(wire: str, model: torch.nn.Module) -> float:
    """Bytes of the wire's form over those of float32, small parameters as they are."""
    each = {
        "bf16": 2.0,
        "fp16": 2.0,
        "int8": 1 + 4 / INT8_BLOCK,
        "sign": 1 / 8 + 4 / SIGN_BLOCK,
        "topk": 8 * RATIO,
        "randomk": 4 * RATIO,
    }
    total = sent = 0.0
    for param in model.parameters():
        plain, name = 4.0 * param.numel(), wire.removeprefix("wire=").split("(")[0]
        total += plain
        if name == "powersgd":
            rows = len(param) if param.dim() > 1 else 1
            thin = 4.0 * RANK * (rows + param.numel() // rows)
            sent += thin if rows > 1 and thin < plain else plain
        else:
            sent += each[name] * param.numel() if param.numel() >= SMALL else plain
    return sent / total


def due(sync: str, psi: int, ranks: int) -> float:
    """Bytes per step and rank without a wire."""
    often = 1 / EVERY if "every" in sync else 1.0
    if sync.startswith("gossip"):
        return psi * often
    if sync.startswith("server"):
        return 2.0 * psi  # to and from a server, also beside one
    if sync.startswith("groups"):
        often = 1.0  # at first everything moves
    return 2 * psi * (ranks - 1) / ranks * often


def inside(out: Path, sync: str, wire: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Gpt(layers=6, d=512, vocabulary=8192, length=16, tied=0)
    psi = sum(p.numel() * p.element_size() for p in model.parameters())
    ratio = stated(wire, model)
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), plan=f"{sync},{wire}")
    ids = torch.randint(0, 8192, (1, 17))

    def steps() -> None:
        for _ in range(STEPS):
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    dt.barrier()
    before, sent = counters(), sum(t.bytes_sent for t in here().comm.traffic.values())
    dt.barrier()
    steps()
    ours = (sum(t.bytes_sent for t in here().comm.traffic.values()) - sent) / STEPS
    dt.barrier()
    found = (counters() - before) / STEPS / dt.world()
    if dt.is_main():
        wanted = ratio * due(sync, psi, dt.world())
        row = {"sync": sync, "wire": wire, "bytes": round(found), "counted": round(ours), "stated": round(wanted)}
        row |= {"ratio": found / due(sync, psi, dt.world()), "stated ratio": ratio, "off": found / wanted - 1}
        (out / "row.json").write_text(json.dumps(row))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(Path(given.inside[0]), *given.inside[1:])
        return 0
    alone()
    rows: list[dict[str, Any]] = []
    for sync, wire in plans():
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", "-m", "benchmarks.wire_bytes"]
            environ = {**os.environ, "DISTRIBUTEDTORCH_SHARED": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
            words = ["--inside", out, sync, wire]
            ended = subprocess.run(
                [*command, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
            )
            found = Path(out, "row.json")
            row = {"sync": sync, "wire": wire, "failed": ended.stderr[-500:]}
            rows.append(json.loads(found.read_text()) if found.exists() else row)
        said = f"{rows[-1]['bytes'] / MIB:.3f} MiB, {rows[-1]['off']:+.2%}" if "off" in rows[-1] else "failed"
        print(f"{sync:16} {wire:22} {said}", flush=True)
    faults = sum("failed" in row or abs(row["off"]) > 0.02 for row in rows)
    result = {"machine": machine(), "pairs": len(rows), "faults": faults, "rows": rows}
    (ROOT / "benchmarks/results/wire_bytes.json").write_text(json.dumps(result, indent=1))
    print(f"{len(rows)} pairs, {faults} more than 2% from what the wire says")
    return faults


if __name__ == "__main__":
    sys.exit(main())
