"""What a rank needs to load a checkpoint of 100M parameters under another plan: memory and bytes read.

Saved by 2 ranks under ddp, loaded by 4 under zero3 into a model built on the meta device; each rank should come to hold
its share of the optimizer's state, one block of 4 MiB, and no more. Writes benchmarks/results/load_memory.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.memory_wire import MIB, resident  # noqa: E402
from benchmarks.step_time import Gpt, machine  # noqa: E402


def read_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def inside(what: str, folder: Path) -> None:
    import distributedtorch as dt

    torch.set_num_threads(1)
    with torch.device("cpu" if what == "save" else "meta"):
        model = Gpt(layers=12, d=768, vocabulary=20480, length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = dt.distribute(model, optimizer)
    if what == "save":
        ids = torch.randint(0, 20480, (1, 17))
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        dt.save(folder / "c")
        return
    before, sent = resident(), read_so_far()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    dt.load(folder / "c")
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    state = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    row = {"peak above": int(peak.split()[1]) * 1024 - before, "state": state, "read": read_so_far() - sent}
    row["resident after"] = resident() - before
    (folder / f"rank{dt.rank()}.json").write_text(json.dumps(row))


def main() -> int:
    if len(sys.argv) > 2:
        inside(sys.argv[1], Path(sys.argv[2]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        for what, world, plan in (("save", 2, "ddp"), ("load", 4, "zero3")):
            command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(world), "--plan", plan]
            subprocess.run([*command, __file__, what, name], check=True, capture_output=True)
        rows = [json.loads((Path(name) / f"rank{k}.json").read_text()) for k in range(4)]
        size = sum(file.stat().st_size for file in Path(name).rglob("*.safetensors"))
    worst = max(rows, key=lambda row: row["peak above"] - row["state"])
    over = (worst["peak above"] - worst["state"]) / MIB
    print(
        f"a checkpoint of {size / MIB:.0f} MiB: each rank comes to hold {worst['state'] / MIB:.1f} MiB of state, "
        f"peak {over:.1f} MiB over that; reads {worst['read'] / size:.2f} of all bytes (checks a quarter, uses some)"
    )
    results = {"machine": machine(), "bytes": size, "rows": rows}
    (ROOT / "benchmarks/results/load_memory.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
