"""Checkpoints with the state on one GPU: `python benchmarks/gpu_checkpoint.py OUT` writes OUT/gpu_checkpoint.json.

Two ranks share the GPU over gloo. Every plan is saved on the GPU and on the CPU at 1 and 2 ranks, and loaded into every
plan on both, to the bit; a run with dropout on the GPU is stopped in the middle of an epoch, resumed, and compared to
an undisturbed one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import machine  # noqa: E402


def run(world: int, device: str, *script: str) -> str:
    start = [sys.executable, *(["-m", "distributedtorch", "run", "--workers", str(world)] if world > 1 else [])]
    environ = {**os.environ, "DEVICE": device, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = subprocess.run(
        [*start, *script], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])
    return ended.stderr


def reshard() -> tuple[int, dict[str, list[str]]]:
    pool = str(ROOT / "tests/checkpoint/reshard_pool.py")
    pairs, wrong = 0, {}
    with tempfile.TemporaryDirectory() as name:
        for device in ("cuda", "cpu"):
            (Path(name) / device).mkdir()
            for world in (1, 2):
                run(world, device, pool, "save", f"{name}/{device}")
        for saved in ("cuda", "cpu"):
            for device in ("cuda", "cpu"):
                for world in (1, 2):
                    run(world, device, pool, "load", f"{name}/{saved}")
                    for file in (Path(name) / saved).glob(f"table.{world}.*.json"):
                        table = json.loads(file.read_text())
                        pairs += len(table)
                        wrong |= {f"{saved}, {pair}, {device}": found for pair, found in table.items() if found}
    return pairs, wrong


def resumed(world: int, plan: str) -> bool:
    script = str(ROOT / "tests/checkpoint/resumed.py")
    with tempfile.TemporaryDirectory() as name:
        for folder in ("one", "two"):
            (Path(name) / folder).mkdir()
        run(world, "cuda", script, f"{name}/one", plan, "3", "0.3")
        run(world, "cuda", script, f"{name}/two", plan, "1", "0.3", "4")
        said = run(world, "cuda", script, f"{name}/two", plan, "3", "0.3")
        if "resumed from" not in said:
            return False
        return (Path(name) / "one/end").read_text() == (Path(name) / "two/end").read_text()


def main(out: Path) -> int:
    same = {
        f"{plan}, {world} ranks": resumed(world, plan)
        for world, plan in ((1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "zero3"))
    }
    print("resumed to the bit:", same, flush=True)
    pairs, wrong = reshard()
    print(f"{torch.cuda.get_device_name()}: {pairs} loads, {len(wrong)} differ {list(wrong.items())[:3]}")
    found = {
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(),
        "resumed": same,
        "loads": pairs,
        "differ": wrong,
    }
    (out / "gpu_checkpoint.json").write_text(json.dumps(found, indent=1))
    return len(wrong) + list(same.values()).count(False)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
