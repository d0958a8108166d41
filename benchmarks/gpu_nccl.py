"""NCCL's part of a step on one GPU: a world of one rank whose exchanges are made all the same.

Every bucket, norm and gather goes to NCCL's stream. Counts, from a trace of one step, the exchanges and the calls that
make the host wait for the GPU, beside a plain loop. A smaller model in float64 ends with the weights of the plain loop.
`python benchmarks/gpu_nccl.py OUT` prints a line per plan and writes OUT/gpu_nccl.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
import distributedtorch as dt  # noqa: E402
from benchmarks.gpu_train import WAITS  # noqa: E402
from benchmarks.step_time import Gpt, machine  # noqa: E402
from distributedtorch import recipes  # noqa: E402
from distributedtorch.core.world import here  # noqa: E402
from distributedtorch.distribute import release  # noqa: E402

PLANS = ("plain", "ddp", "zero1", "zero2", "zero3")
STEPS = 5


def build(plan: str, *, exact: bool) -> tuple[Callable[[torch.Tensor], Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        size = {"layers": 2, "d": 64, "vocabulary": 512} if exact else {"layers": 12, "d": 1024, "vocabulary": 16384}
        model: nn.Module = Gpt(**size, length=512)
    model = model.double() if exact else model
    kind = torch.optim.SGD if exact else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1 if exact else 1e-4, fused=True)
    words = "clip=1.0" if exact else "bf16,clip=1.0"
    if plan != "plain":
        model, optimizer = dt.distribute(model, optimizer, plan=f"{plan},{words}")
        return model, model, optimizer

    def forward(ids: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            logits = model(ids)
        return logits if exact else logits.float()

    return forward, model, optimizer


def train(plan: str, *, exact: bool) -> tuple[Callable[[], None], nn.Module]:
    """A step to be taken again and again, some taken already."""
    forward, model, optimizer = build(plan, exact=exact)
    draw = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 512, (8, 513), device="cuda", generator=draw)

    def step() -> None:
        F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        if plan == "plain":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    return step, model


def traced(plan: str) -> dict[str, Any]:
    step, _ = train(plan, exact=False)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    counts = {e.key: e.count for e in trace.key_averages()}
    return {
        "exchanges in a step": {key: n for key, n in counts.items() if key.startswith("c10d::")},
        "host waits in a step": {key: n for key, n in counts.items() if key in WAITS},
    }


def weights(plan: str) -> list[torch.Tensor]:
    return [p.detach().clone() for p in train(plan, exact=True)[1].parameters()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    here().comm.alone = False
    recipes.sync = lambda trained, plan, world: recipes.SYNCS[plan.sync](trained, plan, world)
    rows, truth, first = [], weights("plain"), build("plain", exact=True)[1]
    assert all(not torch.equal(end, start) for end, start in zip(truth, first.parameters(), strict=True))
    for plan in PLANS:
        row = traced(plan)
        release()
        found = weights(plan)
        release()
        gap = max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in zip(truth, found, strict=True))
        rows.append({"plan": plan, **row, "largest difference": gap})
        print(rows[-1], flush=True)
        gc.collect()
    result = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "rows": rows}
    (given.out / "gpu_nccl.json").write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
