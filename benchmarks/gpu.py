"""One GPU: every plan with two ranks on it over gloo gives the weights of one process; figures as JSON lines.

`python benchmarks/gpu.py OUT` on a machine with one CUDA device (NCCL refuses two ranks on one GPU, gloo does not).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def main(out: Path) -> int:
    environ = {**os.environ, "CONFORMANCE_DEVICE": "cuda", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    environ["DISTRIBUTEDTORCH_BUCKET_BYTES"] = "1024"
    done = out / "gpu_loops.jsonl"
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2"]
    ended = subprocess.run(
        [*command, "-m", "tests.conformance.loops_pool", str(done)], env=environ, cwd=ROOT, check=False
    )
    rows = [json.loads(row) for row in done.read_text().splitlines()] if done.exists() else []
    bad = [row for row in rows if not row["difference"] <= 1e-9]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(rows)} loops x plans, {len(bad)} differ", bad
    )
    print(f"largest difference {max((row['difference'] for row in rows), default=None)}")
    return ended.returncode or len(bad)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
