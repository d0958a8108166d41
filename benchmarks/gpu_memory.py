"""What each rank holds on a GPU at most, exactly: torch's own count of bytes, at start-up and over steps.

Ranks share one GPU over gloo; a GPT of 100.8M parameters, from the meta device under zero3. "Due" at start-up is the
rank's share of parameters and gradients plus the largest block (under the other plans: all that ZeRO's formula gives);
over steps it is the formula with optimizer state, plus one block, plus what one process needs beyond its parameters,
gradients and state (activations). `python benchmarks/gpu_memory.py OUT` writes OUT/gpu_memory.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from benchmarks.step_time import Gpt, machine  # noqa: E402

MIB = 1 << 20
PLANS = ("ddp", "zero1", "zero2", "zero3", "zero3,bf16")


def inside(out: Path) -> None:
    import distributedtorch as dt

    plan = os.environ["PLAN"]
    torch.manual_seed(0)
    with torch.device("meta" if "zero3" in plan else "cuda"):
        model = Gpt(layers=12, d=768, vocabulary=20480, length=64)
    blocks = [*model.blocks, model.token]
    block = max(sum(p.numel() * p.element_size() for p in b.parameters()) for b in blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = dt.distribute(model, optimizer, plan=plan)
    start = torch.cuda.max_memory_allocated()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        ids = torch.randint(0, 20480, (4, 65), device="cuda")
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        forward = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    row = {
        "plan": plan,
        "ranks": dt.world(),
        "MiB of all parameters": sum(p.numel() for p in model.parameters()) * 4 / MIB,
        "MiB of the largest block": block / MIB,
        "MiB at start-up, peak": start / MIB,
        "MiB after start-up": rest / MIB,
        "MiB between forward and backward": forward / MIB,
        "MiB over steps, peak": torch.cuda.max_memory_allocated() / MIB,
        "MiB held": {kind: size / MIB for kind, size in dt.stats().bytes_held.items()},
    }
    if dt.is_main():
        with out.open("a") as file:
            print(json.dumps(row), file=file)


def main(folder: Path) -> None:
    rows, done = [], folder / "gpu_memory.jsonl"
    for plan in PLANS:
        for ranks in (1, 2, 4):
            done.unlink(missing_ok=True)
            command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks)]
            environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PLAN": plan}
            ended = subprocess.run([*command, __file__, "--inside", str(done)], env=environ, check=False)
            if ended.returncode == 0:
                rows.append(json.loads(done.read_text()))
                print({k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    result = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "rows": rows}
    (folder / "gpu_memory.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    inside(Path(sys.argv[2])) if sys.argv[1] == "--inside" else main(Path(sys.argv[1]))
