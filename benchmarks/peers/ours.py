"""distributedtorch: `dt.distribute(model, optimizer, plan=word)`, the words are plans; all else by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import distributedtorch as dt
from benchmarks.peers.loop import Step, adamw, plain
from distributedtorch.core.world import here


def build(word: str, model: nn.Module) -> Step:
    model, optimizer = dt.distribute(model, adamw(model), plan=word)
    return plain(model, optimizer)


@contextmanager
@torch.no_grad()
def agreed(model: nn.Module) -> Iterator[None]:
    """The model that replicas have on average, to look at: training goes on as if nobody had. A group call."""
    means: dict[int, Tensor] = {}
    for member in here().loop.members:
        means |= member.sync.consensus()
    kept = [(param, param.detach().clone()) for param in model.parameters() if id(param) in means]
    for param, _ in kept:
        param.copy_(means[id(param)])
    yield
    for param, value in kept:
        param.copy_(value)
