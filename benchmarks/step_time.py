"""Step time beside torch's own: paired rounds in the same processes, medians with 95% intervals.

GPT of 23.2M parameters (6 layers, d 512, vocabulary 8192, tied, sequence 128, batch 4 a rank), fused AdamW, gloo on
loopback, one thread a rank. Each round takes one step of every variant in a new order; figures are ratios within
rounds. `python benchmarks/step_time.py [--rounds 24] [--ranks 2] [--group divided]` writes
benchmarks/results/step_time.json, or step_time_divided.json for parameters divided (zero3 beside fully_shard).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
OURS = ("ddp", "zero1", "zero2", "zero3")
GROUPS = {
    "replicated": ("no exchange", "torch DDP", "torch ZeroRedundancyOptimizer", "ddp", "zero1", "zero2"),
    "divided": ("no exchange", "torch DDP", "torch fully_shard", "zero3"),
}
"""Variants that are measured in one run."""


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    def __init__(
        self, layers: int = 6, d: int = 512, vocabulary: int = 8192, length: int = 128, tied: bool = True
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d, 8) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight
        for table in (self.token, self.place, self.head):
            nn.init.normal_(table.weight, std=0.02)  # torch's own 1.0 drives the softmax into subnormals: steps x 3

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(variant: str) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """The model and optimizer of a variant, with the members of the library's loop that belong to it."""
    import distributedtorch as dt
    from distributedtorch.core.world import here

    torch.manual_seed(0)
    model: nn.Module = Gpt()
    if variant in OURS:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = dt.distribute(model, optimizer, plan=variant)
        return model, optimizer, [here().loop.members[-1]]
    if variant == "torch fully_shard":
        for block in (*model.blocks, model):  # type: ignore[union-attr,misc]
            fully_shard(block)
    elif variant != "no exchange":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if variant == "torch ZeroRedundancyOptimizer":
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        return model, zero, []
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), []


def measure(rounds: int, variants: tuple[str, ...]) -> None:
    import distributedtorch as dt
    from distributedtorch.core.world import here

    torch.set_num_threads(1)
    dt.barrier()
    built = {variant: build(variant) for variant in variants}
    draw = torch.Generator().manual_seed(dt.rank())
    order, seconds = list(variants), {variant: [] for variant in variants}
    shuffled = random.Random(0)
    for number in range(rounds + 2):
        shuffled.shuffle(order)
        ids = torch.randint(0, 8192, (4, 129), generator=draw)
        for variant in order:
            model, optimizer, members = built[variant]
            here().loop.members[:] = members
            dist.barrier()
            began = time.perf_counter()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= 2:
                seconds[variant].append(time.perf_counter() - began)
    if dt.is_main():
        print("RESULT " + json.dumps(seconds), flush=True)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95% interval, by resampling rounds."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": "python " + " ".join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--group", choices=GROUPS, default="replicated")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return measure(given.rounds, GROUPS[given.group])
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(given.ranks), __file__, "--inside"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--rounds", str(given.rounds), "--group", given.group]
    out = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    table = {}
    for variant in GROUPS[given.group]:
        row: dict[str, Any] = {"ms": [round(1e3 * v, 1) for v in interval(seconds[variant])]}
        for base in GROUPS[given.group][:3]:
            ratios = [a / b for a, b in zip(seconds[variant], seconds[base], strict=True)]
            row[f"to {base}"] = [round(v, 3) for v in interval(ratios)]
        table[variant] = row
        said = "   ".join(f"to {base} {row[f'to {base}']}" for base in GROUPS[given.group][:3])
        print(f"{variant:32} {row['ms'][0]:8.1f} ms   {said}")
    result = {"machine": machine(), "ranks": given.ranks, "rounds": given.rounds, "table": table, "seconds": seconds}
    name = "step_time" if given.group == "replicated" else f"step_time_{given.group}"
    (ROOT / f"benchmarks/results/{name}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
