"""What a library adds to a step on one GPU: the two-line version, Accelerate and Fabric over the hand-written loop.

GPT of 1.4B parameters (24 layers, d 2048, sequence 2048, batch 8), bfloat16, torch.compile, fused AdamW. Every variant
is a process of its own that waits between its turns with only its weights and optimizer state on the GPU; rounds are
paired: one turn of each, in a new order, a turn being a step to warm up and a timed one. `python benchmarks/gpu_tax.py
OUT [--rounds 40]` prints ratios to the loop (median, 95% interval) and peak memory, and writes OUT/gpu_tax.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from benchmarks.step_time import Gpt, interval, machine  # noqa: E402

VOCABULARY, LENGTH, BATCH = 50304, 2048, 8
VARIANTS = ("loop", "distributedtorch", "Accelerate", "Fabric")
Step = Callable[[], torch.Tensor]


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(variant: str, layers: int) -> Step:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = Gpt(layers=layers, d=2048, vocabulary=VOCABULARY, length=LENGTH)
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    if variant == "distributedtorch":
        import distributedtorch as dt

        model, optimizer = dt.distribute(model, optimizer, plan="ddp,bf16")
    elif variant == "Accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    elif variant == "Fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    compiled = torch.compile(model)

    def step() -> torch.Tensor:
        if variant == "loop":
            with torch.autocast("cuda", torch.bfloat16):
                logits = compiled(ids[:, :-1])
            loss = loss_of(logits.float(), ids)
        else:
            loss = loss_of(compiled(ids[:, :-1]), ids)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def inside(variant: str, layers: int) -> None:
    """One variant: a turn for every line that comes in."""
    step = build(variant, layers)
    for _ in range(3):
        step()
    for _ in sys.stdin:
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        print("TURN " + json.dumps([seconds, torch.cuda.max_memory_allocated() / 2**30, float(loss)]), flush=True)
        del loss
        torch.cuda.empty_cache()


def turn(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("TURN "):
            return list(json.loads(line[5:]))
    raise RuntimeError(f"a variant ended with code {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return inside(given.inside, given.layers)
    processes: dict[str, subprocess.Popen[str]] = {}
    turns: dict[str, list[list[float]]] = {}
    failed: dict[str, str] = {}
    for variant in given.variants:
        command = [sys.executable, __file__, str(given.out), "--layers", str(given.layers), "--inside", variant]
        processes[variant] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            turn(processes[variant])  # built and compiled before the next one begins
            turns[variant] = []
        except RuntimeError as error:
            failed[variant] = str(error)
    draw, order = random.Random(0), list(turns)
    for _ in range(given.rounds):
        draw.shuffle(order)
        for variant in order:
            turns[variant].append(turn(processes[variant]))
    for process in processes.values():
        process.communicate()
    table = {}
    for variant, rows in turns.items():
        ratios = [row[0] / base[0] for row, base in zip(rows, turns["loop"], strict=True)]
        median, low, high = interval([row[0] for row in rows])
        table[variant] = {
            "ms": [round(1e3 * v, 1) for v in (median, low, high)],
            "to the loop": [round(v, 4) for v in interval(ratios)],
            "GiB": round(max(row[1] for row in rows), 2),
            "loss": rows[-1][2],
        }
        print(variant, table[variant], flush=True)
    named = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "rounds": given.rounds, "failed": failed}
    result = {**named, "table": table, "turns": turns}
    (given.out / "gpu_tax.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
