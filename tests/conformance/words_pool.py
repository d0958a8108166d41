"""What each process of a pool runs: every pair of built words, the weights kept by plan text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import distributedtorch as dt
from distributedtorch.data.balance import Clock
from distributedtorch.distribute import release
from tests.conformance.cases import PLANS
from tests.conformance.loops import adam, rows

WORDS = ("accumulate=2", "batch=4", "clip=0.05", "recompute")
TEXTS = sorted({",".join(dict.fromkeys(pair)) for pair in combinations([*WORDS, *WORDS], 2)})
BALANCED = ",".join([*WORDS, "balance"])
"""With rank 0 slow, so that shares change."""
WITH = {"zero1": WORDS[:2], "zero2": (*WORDS[2:], BALANCED)}
"""What `share` goes with: every word under one of its plans."""


class Watch:
    """A clock that only rows move: what shares come to does not depend on how busy the machine is."""

    now = 0.0

    @classmethod
    def move(cls, seconds: float) -> None:
        cls.now += seconds


def train(plan: str) -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3))
    if "balance" in plan and dt.world() > 1:
        seconds = 0.001 if dt.rank() else 0.008
        model.register_forward_pre_hook(lambda _, args: Watch.move(len(args[0]) * seconds))
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, data, scheduler = dt.distribute(model, optimizer, rows(), scheduler, plan=plan)
    for _ in range(3):
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert "balance" not in plan or dt.world() == 1 or dt.stats().shares[0] < 1 / 3, dt.stats().shares
    return model


def two_losses(distribute: Callable[..., Any] | None) -> nn.Module:
    """Two backwards per batch in windows of two batches; written out where there is no library."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = adam(model)
    if distribute is None:
        for _ in range(2):
            batches = list(rows())
            for start in range(0, len(batches), 2):
                window = batches[start : start + 2]
                for x, y in window:
                    part = len(x) / sum(len(a) for a, _ in window)
                    (part * (F.mse_loss(model(x), y) + F.l1_loss(model(x), y))).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model
    model, optimizer, data = distribute(model, optimizer, rows())
    for _ in range(2):
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            F.l1_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    Clock._now = lambda self: Watch.now  # type: ignore[method-assign]
    for plan in PLANS if dt.world() > 1 else PLANS[:1]:
        more = [f"{BALANCED},replicate=3"] if plan.startswith("zero") else []
        for text in [*TEXTS, BALANCED, *more, *(f"{word},share" for word in WITH.get(plan, ()))]:
            state = {name: tensor.contiguous() for name, tensor in train(f"{plan},{text}").state_dict().items()}
            if dt.is_main():
                save_file(state, folder / f"{plan},{text}-{dt.world()}.safetensors")
            release()
        state = dict(two_losses(partial(dt.distribute, plan=f"{plan},accumulate=2")).state_dict())
        release()
        if dt.is_main():
            save_file(state, folder / f"{plan},two losses-{dt.world()}.safetensors")
            save_file(dict(two_losses(None).state_dict()), folder / "two losses.safetensors")


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
