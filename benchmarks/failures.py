"""Failures on purpose: how long until everything has ended, was the right rank named, is any process left.

`python benchmarks/failures.py [--times 20] [--plan zero1] [--only FAULT ...]` writes benchmarks/results/failures.json,
fault by fault (about 20 minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import machine  # noqa: E402

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distributedtorch as dt
fault, folder = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(40000, 16), torch.randint(0, 4, (40000,))), batch_size=8, num_workers=1)
model, optimizer, loader = dt.distribute(model, optimizer, loader, plan=sys.argv[3])
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    victim = 0 if fault == "kill rank 0" else 1
    if step == 20 and dt.rank() == victim:
        (folder / "began.tmp").write_text(str(time.monotonic()))
        (folder / "began.tmp").rename(folder / "began")
        if fault == "raise": raise ValueError("on purpose")
        if fault == "sys.exit": sys.exit(3)
        if fault == "break": break
        if fault.startswith("kill rank"): os.kill(os.getpid(), signal.SIGKILL)
        if fault == "kill parent": os.kill(os.getppid(), signal.SIGKILL)
"""
FAULTS = {
    "raise": ("rank 1", "ValueError"),
    "sys.exit": ("rank 1", "code 3"),
    "break": ("rank 1", "left the loop"),
    "kill rank 1": ("rank 1", "SIGKILL"),
    "kill rank 0": ("rank 0", "SIGKILL"),
    "kill parent": (),  # no rank to name
    "Ctrl-C": (),
}


def left(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def one(fault: str, plan: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder, marker = Path(name), uuid.uuid4().hex
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "3", str(script), fault, name, plan]
        environ = {**os.environ, "MARKER": marker}
        job = subprocess.Popen(
            command, cwd=name, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while not (folder / "began").exists():
            assert job.poll() is None, job.stderr and job.stderr.read()
            time.sleep(0.01)
        if fault == "Ctrl-C":
            (folder / "began").write_text(str(time.monotonic()))
            job.send_signal(signal.SIGINT)
        assert job.stderr is not None
        said = job.stderr.read()
        code = job.wait()
        began = float((folder / "began").read_text())
        while left(marker) and time.monotonic() - began < 10:
            time.sleep(0.02)
        seconds, remaining = time.monotonic() - began, left(marker)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    named = all(fragment in said for fragment in FAULTS[fault]) if FAULTS[fault] else None
    return {
        "fault": fault,
        "seconds": seconds,
        "code": code,
        "named": named,
        "left": len(remaining),
        "said": said[-800:],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--plan", default="zero1")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    path, failed = ROOT / "benchmarks/results/failures.json", 0
    results = json.loads(path.read_text()) if path.exists() else {}
    for fault in given.only:
        mine = [one(fault, given.plan) for _ in range(given.times)]
        seconds = [float(str(row["seconds"])) for row in mine]
        bad = [r for r in mine if r["named"] is False or r["left"] or r["code"] == 0 or float(str(r["seconds"])) > 5]
        failed += len(bad)
        named = sum(bool(r["named"]) for r in mine) if FAULTS[fault] else "-"
        print(
            f"{fault:12} {given.times} times: seconds to the end median {statistics.median(seconds):.2f} "
            f"largest {max(seconds):.2f}, right rank named {named}, "
            f"processes left {sum(int(str(r['left'])) for r in mine)}, "
            f"codes {sorted({int(str(r['code'])) for r in mine})}",
            flush=True,
        )
        for row in bad:
            print(f"    {row}")
        kept = [{key: value for key, value in row.items() if key != "said"} for row in mine]  # it has paths in it
        named_so = fault if given.plan == "zero1" else f"{given.plan}: {fault}"
        results[named_so] = {"machine": machine(), "times": given.times, "failed": len(bad), "rows": kept}
        path.write_text(json.dumps(results, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
