"""One GPU, one rank: a GPT of 1.4B parameters in bfloat16 with torch.compile, plain and through the library.

Counts what the library adds to a step: milliseconds, graph breaks, and calls that make the host wait for the GPU (from
a trace). `python benchmarks/gpu_train.py OUT [--layers 24]` prints a line per variant and writes OUT/gpu_train.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from benchmarks.step_time import Gpt  # noqa: E402

VOCABULARY, LENGTH = 50304, 2048
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def build(variant: str, layers: int, width: int) -> tuple[Callable[[torch.Tensor], Any], torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = Gpt(layers=layers, d=width, vocabulary=VOCABULARY, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if variant == "plain":
        compiled = torch.compile(model)

        def forward(ids: torch.Tensor) -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return compiled(ids).float()  # a loss in float32, as the library gives it

        return forward, optimizer
    import distributedtorch as dt

    plan = variant if "fp8" in variant else f"{variant},bf16"
    model, optimizer = dt.distribute(model, optimizer, plan=plan)
    return torch.compile(model), optimizer


def measure(variant: str, given: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    forward, optimizer = build(variant, given.layers, given.width)
    ids = torch.randint(0, VOCABULARY, (given.batch, LENGTH + 1), device="cuda")

    def step() -> None:
        logits = forward(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    seconds = []
    for _ in range(given.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    waits = {e.key: e.count for e in trace.key_averages() if e.key in WAITS}
    row = {
        "variant": variant,
        "ms": [round(1e3 * v, 1) for v in (statistics.median(seconds), min(seconds), max(seconds))],
        "graph breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
        "host waits in a step": waits,
        "GiB": round(torch.cuda.max_memory_allocated() / (1 << 30), 1),
    }
    print(row, flush=True)
    return row


def clear() -> None:
    """Let go of a variant before the next one."""
    if "distributedtorch" in sys.modules:
        sys.modules["distributedtorch.distribute"].release()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variants", nargs="*", default=["plain", "ddp", "zero3", "ddp,fp8", "plain", "ddp"])
    given = parser.parse_args()
    rows = []
    for variant in given.variants:
        rows.append(measure(variant, given))
        clear()
    named = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    (given.out / "gpu_train.json").write_text(json.dumps(named, indent=1))


if __name__ == "__main__":
    main()
