"""What the library costs apart from moving bytes: at import, at `dt.distribute`, and per parameter and step.

300 parameters of 8 elements each (150 layers), 2 ranks, one thread each. Rounds take one step of every variant in a new
order. `python benchmarks/lean.py [--rounds 100]` prints and writes benchmarks/results/lean.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import interval, machine  # noqa: E402

OURS = ("ddp", "zero1", "zero2", "zero3")
VARIANTS = ("no exchange", "torch DDP", "torch fully_shard", *OURS)
LAYERS, WIDTH = 150, 8
STARTS = 15


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def build(variant: str) -> tuple[nn.Module, torch.optim.Optimizer, list[Any], float]:
    import distributedtorch as dt
    from distributedtorch.core.world import here

    model: nn.Module = nn.Sequential(*(Scale() for _ in range(LAYERS)))
    if variant in OURS:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        dt.barrier()
        began = time.perf_counter()
        model, optimizer = dt.distribute(model, optimizer, plan=variant)
        return model, optimizer, [here().loop.members[-1]], time.perf_counter() - began
    if variant == "torch fully_shard":
        fully_shard(model)
    elif variant != "no exchange":
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True), [], 0.0


def measure(rounds: int) -> None:
    import distributedtorch as dt
    from distributedtorch.core.world import here

    torch.set_num_threads(1)
    dt.barrier()
    built = {variant: build(variant) for variant in VARIANTS}
    order, seconds, x = list(VARIANTS), {variant: [] for variant in VARIANTS}, torch.randn(4, WIDTH)
    shuffled = random.Random(0)
    for number in range(rounds + 5):
        shuffled.shuffle(order)
        for variant in order:
            model, optimizer, members, _ = built[variant]
            here().loop.members[:] = members
            dist.barrier()
            began = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 5:
                seconds[variant].append(time.perf_counter() - began)
    starts = {variant: built[variant][3] for variant in OURS}
    if dt.is_main():
        print("RESULT " + json.dumps({"seconds": seconds, "distribute": starts}), flush=True)


def imports() -> dict[str, list[float]]:
    """Seconds of a Python that imports torch alone, and with the library, in turn."""
    texts = {"torch": "import torch", "with distributedtorch": "import torch, distributedtorch"}
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as everywhere
    subprocess.run([sys.executable, "-c", texts["with distributedtorch"]], env=environ, check=True)
    seconds: dict[str, list[float]] = {name: [] for name in texts}
    for _ in range(STARTS):
        for name, text in texts.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], env=environ, check=True)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return measure(given.rounds)
    found = imports()
    added = interval([a - b for a, b in zip(found["with distributedtorch"], found["torch"], strict=True)])
    print(f"import adds {added[0]:.3f} s [{added[1]:.3f}, {added[2]:.3f}] to torch's")
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", __file__, "--inside"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command += ["--rounds", str(given.rounds)]
    out = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    print("dt.distribute takes " + ", ".join(f"{name} {s:.3f} s" for name, s in result["distribute"].items()))
    table, base = {}, result["seconds"]["no exchange"]
    for variant in VARIANTS:
        each = [1e6 * (a - b) / (2 * LAYERS) for a, b in zip(result["seconds"][variant], base, strict=True)]
        whole = 1e6 * interval(result["seconds"][variant])[0] / (2 * LAYERS)
        table[variant] = {"us per parameter": whole, "us added": interval(each)}
        print(f"{variant:20} {whole:7.1f} us per parameter and step, added {interval(each)[0]:6.1f}")
    stored = {"machine": machine(), "import": found, "distribute": result["distribute"], "table": table}
    (ROOT / "benchmarks/results/lean.json").write_text(json.dumps(stored, indent=1))


if __name__ == "__main__":
    main()
