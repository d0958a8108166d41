"""Bytes of every pair of a sync and a wire, by the interface, beside what the wire says of itself.

Two ranks on the loopback of a network namespace of their own (needs root), a GPT of 27M parameters; sent per step and
rank over what the same plan would send without the wire. One job runs all wires of a sync. A job sends something while
it trains nothing, too (beats of the watch and the supervisor): its rate is measured while all ranks sleep, at the first
wire and after the last, and taken off for the seconds that the steps took. Both figures are stored, what was measured
while idle, and how many segments TCP sent again (loopback loses none: see memory_wire.py for why it would).
`python -m benchmarks.wire_bytes` writes benchmarks/results/wire_bytes.json; more than 2% from the stated ratio, without
the idle rate, counts as a fault. `--only topk` runs the pairs whose text has this word and stores nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import distributedtorch as dt
from benchmarks.memory_wire import MIB, alone, counters, sent_again
from benchmarks.step_time import ROOT, Gpt, machine
from distributedtorch.core.plan import Plan
from distributedtorch.core.wire import SMALL
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.menu import pairs
from distributedtorch.wire.quantize import INT_BLOCK, SIGN_BLOCK

STEPS, EVERY, RATIO, RANK = 2, 2, 0.01, 4
SECONDS_IDLE = 4.0
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


def stated(sync: str, wire: str, model: Gpt, ids: torch.Tensor) -> float:
    """Bytes of the wire's form over those of float32, small parameters as they are.

    Under ddp only used rows of the token table travel by codes that have something of every number, and a byte for each
    row that says which they are.
    """
    each = {
        "bf16": 2.0,
        "fp16": 2.0,
        "int8": 1 + 4 / INT_BLOCK,
        "int4": 1 / 2 + 4 / INT_BLOCK,
        "int2": 1 / 4 + 4 / INT_BLOCK,
        "sign": 1 / 8 + 4 / SIGN_BLOCK,
        "topk": 8 * RATIO,
        "randomk": 4 * RATIO,
    }
    total = sent = 0.0
    name, ranks = wire.removeprefix("wire=").split("(")[0], dt.world()
    rows_only = model.token.weight if sync == "ddp" and name not in ("topk", "randomk", "powersgd") else None
    for param in model.parameters():
        plain = 4.0 * param.numel()
        total += plain
        if param is rows_only:
            sent += each[name] * len(ids.unique()) * param.shape[1] + len(param) * ranks / 2
            continue
        if name == "powersgd":
            rows = len(param) if param.dim() > 1 else 1
            thin = 4.0 * RANK * (rows + param.numel() // rows)
            sent += thin if rows > 1 and thin < plain else plain
        else:
            sent += each[name] * param.numel() if param.numel() >= SMALL else plain
    return sent / total


def steps_of(sync: str) -> int:
    """How many are counted. After a barrier a worker of a server pulls once more: spread over more steps."""
    return 2 * STEPS if sync.startswith("server") else STEPS


def due(sync: str, model: Gpt, ranks: int) -> float:
    """Bytes per step and rank without a wire."""
    psi = _bytes(model)
    often = 1 / EVERY if "every" in sync else 1.0
    if sync.startswith("gossip"):
        return psi * often
    if sync.startswith("server"):
        return 2.0 * psi  # to and from a server, also beside one
    if sync.startswith("groups"):
        often = 1.0  # at first everything moves
    if sync == "zero3":  # backward needs no embedding, and finds the head where forward has left it
        once = sum(map(_bytes, (model.head, model.norm, model.token, model.place)))
        return (3 * psi - once) * (ranks - 1) / ranks
    return 2 * psi * (ranks - 1) / ranks * often


def _bytes(module: torch.nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def between_barriers(act: Callable[[], None]) -> tuple[int, float]:
    """Bytes on the interface, and seconds, while all ranks do this."""
    dt.barrier()
    before, began = counters(), time.monotonic()
    dt.barrier()
    act()
    dt.barrier()
    return counters() - before, time.monotonic() - began


def idle() -> dict[str, float]:
    """What the job sends while its ranks sleep, less what the barriers around that send by themselves."""
    barriers, seconds_barriers = between_barriers(lambda: None)
    sent, seconds = between_barriers(lambda: time.sleep(SECONDS_IDLE))
    rate = (sent - barriers) / (seconds - seconds_barriers)
    return {"seconds": seconds, "bytes": sent, "bytes of barriers": barriers, "bytes per second": rate}


def counted() -> int:
    """Bytes that this rank says it has sent."""
    return sum(traffic.bytes_sent for traffic in here().comm.traffic.values())


def figures(found: float, plain: float, ratio: float) -> dict[str, float]:
    """Bytes per step and rank, over those without a wire, and how far that is from the stated ratio."""
    return {"bytes": round(found), "ratio": found / plain, "off": found / plain / ratio - 1}


def inside(out: Path, sync: str, wires: list[str]) -> None:
    """One rank: every wire in turn, a file for each."""
    torch.set_num_threads(1)
    rests: list[dict[str, float]] = []
    rows = [counted_row(sync, wire, rests, last=wire == wires[-1]) for wire in wires]
    if dt.is_main():
        (out / "rows.json").write_text(json.dumps([with_ratios(row, rests) for row in rows]))


def counted_row(sync: str, wire: str, rests: list[dict[str, float]], *, last: bool) -> dict[str, Any]:
    """What one pair sends; `rests` gets what the job sends while idle."""
    torch.manual_seed(0)
    model: Any = Gpt(layers=6, d=512, vocabulary=8192, length=16, tied=0)
    ids = torch.randint(0, 8192, (1, 17))
    ratio, plain = stated(sync, wire, model, ids[:, :-1]), due(sync, model, dt.world())
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), plan=f"{sync},{wire}")

    def steps() -> None:
        for _ in range(steps_of(sync)):
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    rests += [] if rests else [idle()]
    before, again = counted(), sent_again()
    sent, seconds = between_barriers(steps)
    ours, again = (counted() - before) / steps_of(sync), sent_again() - again
    rests += [idle()] if last else []
    release()
    found = {"sync": sync, "wire": wire, "counted": round(ours), "stated": round(ratio * plain)}
    return {
        **found,
        "stated ratio": ratio,
        "plain": plain,
        "sent": sent,
        "seconds": seconds,
        "segments sent again": again,
    }


def with_ratios(row: dict[str, Any], rests: list[dict[str, float]]) -> dict[str, Any]:
    """The row, as measured and without what the job sends while idle."""
    rate = sum(rest["bytes per second"] for rest in rests) / len(rests)
    sent, each = row["sent"], steps_of(row["sync"]) * dt.world()
    ratios = {"raw": sent, "corrected": sent - rate * row["seconds"]}
    found = {which: figures(value / each, row["plain"], row["stated ratio"]) for which, value in ratios.items()}
    return {**row, "idle": rests, **found}


def measured(sync: str, wires: list[str]) -> list[dict[str, Any]]:
    """All wires of a sync, in one job."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", "-m", "benchmarks.wire_bytes"]
        environ = {**os.environ, "DISTRIBUTEDTORCH_SHARED": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        words = ["--inside", out, sync, *wires]
        ended = subprocess.run([*command, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        found = Path(out, "rows.json")
        if not found.exists():
            return [{"sync": sync, "wire": wire, "failed": ended.stderr[-500:]} for wire in wires]
        rows: list[dict[str, Any]] = json.loads(found.read_text())
        return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only pairs whose text has this; nothing is stored")
    given = parser.parse_args()
    if given.inside:
        inside(Path(given.inside[0]), given.inside[1], given.inside[2:])
        return 0
    alone()
    rows: list[dict[str, Any]] = []
    asked = [(sync, wire) for sync, wire in plans() if given.only in f"{sync},{wire}"]
    for sync in dict.fromkeys(sync for sync, _ in asked):
        for row in measured(sync, [wire for other, wire in asked if other == sync]):
            rows.append(row)
            print(f"{sync:16} {row['wire']:22} {_said(row)}", flush=True)
    faults = {
        which: sum("failed" in row or abs(row[which]["off"]) > 0.02 for row in rows) for which in ("raw", "corrected")
    }
    result = {"machine": machine(), "pairs": len(rows), "faults": faults, "rows": rows}
    if not given.only:
        (ROOT / "benchmarks/results/wire_bytes.json").write_text(json.dumps(result, indent=1))
    print(
        f"{len(rows)} pairs, {faults['corrected']} more than 2% from what the wire says ({faults['raw']} as measured)"
    )
    return faults["corrected"]


def _said(row: dict[str, Any]) -> str:
    if "failed" in row:
        return "failed"
    raw, corrected = row["raw"], row["corrected"]
    return f"{raw['bytes'] / MIB:.3f} MiB, {raw['off']:+.2%}; without beats {corrected['off']:+.2%}"


if __name__ == "__main__":
    sys.exit(main())
