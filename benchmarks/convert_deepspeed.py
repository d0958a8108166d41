"""Checkpoints that DeepSpeed wrote, converted and gone on with: differences of weights, moments and later losses.

`python benchmarks/convert_deepspeed.py --deepspeed PYTHON`, where PYTHON is of an environment with deepspeed, makes the
files of ZeRO 1, 2 and 3 in fp32 and bf16 on two CPU processes (benchmarks/deepspeed_files.py), converts them with
`dtorch convert`, loads them here and trains on in fp32 with the same batches; after bf16 the later losses differ by
bf16's own rounding. Written to benchmarks/results/convert.json.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.deepspeed_files import MORE, Model, batch, loss_of, optimizer_of  # noqa: E402
from benchmarks.step_time import machine  # noqa: E402

KINDS = [
    "--stage 1",
    "--stage 2",
    "--stage 3",
    "--stage 1 --bf16",
    "--stage 2 --bf16",
    "--stage 3 --bf16",
    "--stage 3 --sub-group 100",
]


def make(python: str, folder: Path, kind: str) -> None:
    """DeepSpeed's own files."""
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "deepspeed_files.py"), str(folder), *kind.split()]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}
    env.pop("PYTHONPATH", None)
    folder.mkdir(exist_ok=True)
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)


def compared(folder: Path, kind: str) -> dict[str, Any]:
    """Convert, load, go on."""
    import distributedtorch as dt
    from distributedtorch.distribute import release

    command = [sys.executable, "-m", "distributedtorch", "convert", str(folder / "checkpoint"), str(folder / "ours")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    expected = torch.load(folder / "expected.pt", weights_only=True)
    torch.manual_seed(1)
    model = Model()
    model, optimizer = dt.distribute(model, optimizer_of(model))
    dt.load(folder / "ours")
    have = {"weights": dict(model.named_parameters())}
    for moment in ("exp_avg", "exp_avg_sq"):
        have[moment] = {
            name: optimizer.state[p][moment] for name, p in model.named_parameters() if p in optimizer.state
        }
    gaps = {
        part: max((gap(have[part][name], value) for name, value in expected[part].items()), default=None)
        for part in have
    }
    losses = []
    for step in range(expected["step"], expected["step"] + MORE):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    release()
    later = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
    return {
        "kind": kind,
        "said": said.splitlines()[0].split("(")[-1],
        "largest differences": gaps,
        "later losses": later,
    }


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().double() - other.double()).abs().max())


def main() -> None:
    """All kinds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, metavar="PYTHON", help="python with deepspeed")
    parser.add_argument("--folder", type=Path, help="use the files that are there")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind in KINDS:
            folder = (asked.folder or Path(temporary)) / kind.replace("--", "").replace(" ", "-")
            if not (folder / "expected.pt").exists():
                make(asked.deepspeed, folder, kind)
            rows.append(compared(folder, kind))
            print(rows[-1], flush=True)
    result = {**machine(), "command": "python benchmarks/convert_deepspeed.py --deepspeed PYTHON", "kinds": rows}
    (ROOT / "benchmarks" / "results" / "convert.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
