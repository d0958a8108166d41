"""zero3 on GPU ranks of one host: blocks read from each other's GPU memory, beside the way through host memory.

Several ranks on one GPU. Exact: a small model in float64 with long pauses put into the GPU's work of one rank or
another, so that a copy that does not wait for its owner, or an owner that does not wait for readers, is seen: weights
against one process, and the same with either wait left out. Fast: a forward of 350M parameters that gathers everything,
from GPU memory and through the host, with the calls that make the host wait for the GPU counted in a trace.
`python benchmarks/gpu_pull.py OUT` prints a line per case and writes OUT/gpu_pull.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
import distributedtorch as dt  # noqa: E402
from benchmarks.gpu_train import WAITS  # noqa: E402
from benchmarks.step_time import Gpt, machine  # noqa: E402
from distributedtorch.core.reach import Reach  # noqa: E402
from distributedtorch.core.world import here  # noqa: E402
from distributedtorch.sync import divided  # noqa: E402

STEPS, PAUSE = 12, 20_000_000
"""Steps, and the length of a pause in clock ticks: about ten milliseconds."""


def sabotage(what: str) -> None:
    """Leave out one of the two waits."""
    if what == "written":
        original = Reach.copy

        def early(self: Reach, rank: int, card: bytes, target: torch.Tensor) -> None:
            original(self, rank, card[:-8] + bytes(8), target)  # offered with the count at the beginning

        Reach.copy = early  # type: ignore[method-assign]
    elif what == "read":
        Reach.may_write = lambda self: None  # type: ignore[method-assign]


def exact(what: str) -> None:
    sabotage(what)

    def trained(*, alone: bool) -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: nn.Module = Gpt(layers=3, d=256, vocabulary=512, length=64).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not alone:
            model, optimizer = dt.distribute(model, optimizer, plan="zero3")
        draw = torch.Generator("cuda").manual_seed(1)
        for number in range(STEPS):
            ids = torch.randint(0, 512, (4, 65), device="cuda", generator=draw)
            if not alone and number % dt.world() == dt.rank():
                torch.cuda._sleep(PAUSE)
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            if not alone and (number + 1) % dt.world() == dt.rank():
                torch.cuda._sleep(PAUSE)
            optimizer.step()
            optimizer.zero_grad()
        return model, [p.detach().clone() for p in model.parameters()]

    truth = trained(alone=True)[1]
    found = trained(alone=False)[1]
    gap = max(float((a - b).norm() / a.norm()) for a, b in zip(truth, found, strict=True))
    told({"largest difference": gap, "reached": divided.ALL[0].pull.reach is not None})


def changed(what: str) -> None:
    """Owners write at once while a reader's copies still wait in its stream: what it reads must be of before."""
    sabotage(what)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = Gpt(layers=3, d=256, vocabulary=512, length=64).double()
    truth, ids = copy.deepcopy(model), torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    model, _ = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")
    found = []
    for number in range(STEPS):
        if number % dt.world() == dt.rank():
            torch.cuda._sleep(PAUSE)
        with torch.no_grad():
            found.append(model(ids))
        divided.fence()
        for unit in divided.ALL[0].units:
            unit.own.mul_(0.9)
        divided.refilled()
    gap = 0.0
    for one in found:
        with torch.no_grad():
            right = truth(ids)
            gap = max(gap, float((one - right).norm() / right.norm()))
            for param in truth.parameters():
                param.mul_(0.9)
    gaps = here().comm.exchange("gaps", torch.tensor([gap], dtype=torch.float64))
    told({"largest difference": float(gaps.max()), "reached": divided.ALL[0].pull.reach is not None})


def fast() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = Gpt(layers=24, d=1024, vocabulary=16384, length=128)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model, _ = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")
    ids, seconds = torch.zeros(1, 128, dtype=torch.int64, device="cuda"), []

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    for number in range(25):
        dt.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        forward()
        torch.cuda.synchronize()
        seconds += [time.perf_counter() - began] if number >= 5 else []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        forward()
    waits = {event.key: event.count for event in trace.key_averages() if event.key in WAITS}
    median = statistics.median(seconds)
    fetched = size * (dt.world() - 1) / dt.world()
    row = {"ms": round(1e3 * median, 2), "GB/s": round(fetched / median / 1e9, 1), "host waits": waits}
    told({**row, "reached": divided.ALL[0].pull.reach is not None})


def told(row: dict[str, Any]) -> None:
    if dt.is_main():
        print("ROW " + json.dumps(row), flush=True)


def run(ranks: int, *words: str, shared: bool = True) -> dict[str, Any]:
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), __file__, ".", "--inside"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "DISTRIBUTEDTORCH_SHARED": str(int(shared))}
    ended = subprocess.run([*command, *words], env=environ, capture_output=True, text=True, timeout=200, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    return dict(json.loads(found[0][4:])) if found else {"failed": ended.stderr[-600:]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        {"exact": exact, "changed": changed, "fast": lambda _: fast()}[given.inside[0]](given.inside[-1])
        return 0
    rows, faults = [], 0
    for ranks in (2, 4):
        for case, what in (("exact", "none"), ("exact", "written"), ("changed", "none"), ("changed", "read")):
            row = {"ranks": ranks, "case": case, "left out": what, **run(ranks, case, what)}
            right = row.get("largest difference", 1.0) <= 1e-12 and row.get("reached")
            faults += bool(right) != (what == "none")
            rows.append(row)
            print(row, flush=True)
        for shared in (True, False):
            rows.append({"ranks": ranks, "through": "GPU memory" if shared else "host memory"})
            rows[-1] |= run(ranks, "fast", shared=shared)
            print(rows[-1], flush=True)
    result = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "faults": faults, "rows": rows}
    (given.out / "gpu_pull.json").write_text(json.dumps(result, indent=1))
    return faults


if __name__ == "__main__":
    sys.exit(main())
