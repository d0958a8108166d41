"""The plain training loop that every library except DeepSpeed leaves to the user."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]
"""One training step on ids (rows, length + 1); gives this rank's loss."""

LEARNING_RATE = float(os.environ.get("BENCHMARK_LEARNING_RATE", "1e-4"))
"""Where a loss is a figure, it is searched for; where only time is, it does not matter."""
WARM_UP = int(os.environ.get("BENCHMARK_WARM_UP", "0"))
"""Steps over which the learning rate grows to that."""
CLIP = float(os.environ.get("BENCHMARK_CLIP", "0"))
"""The largest norm of a step's gradients, where something is to be learned; 0: any."""
BETAS = (0.9, float(os.environ.get("BENCHMARK_BETA", "0.999")))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None] = torch.Tensor.backward
) -> Step:
    """Forward, backward, step, zero_grad; `backward` where a library has its own."""
    to_come = iter(range(1, WARM_UP + 1))

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        backward(loss)
        if (number := next(to_come, None)) is not None:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * number / WARM_UP
        if CLIP:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
