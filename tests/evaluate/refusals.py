"""What only several ranks can get wrong: refused in words, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import distributedtorch as dt
from tests.evaluate.cases import LOADERS, data, network


def other_weights() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] += dt.rank()  # type: ignore[index,operator]
    dt.evaluate(model, LOADERS["plain"](8))


def other_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5)).double()
    model[0].running_mean += dt.rank()  # type: ignore[operator]
    dt.evaluate(model, LOADERS["plain"](8), {"first": lambda output, target: output[:, 0]})


def other_samples() -> None:
    dt.evaluate(network(), DataLoader(Subset(data(8), [dt.rank(), 5, 6]), batch_size=2))


def other_data() -> None:
    dt.evaluate(network(), LOADERS["plain"](8 + dt.rank()))


def other_stream() -> None:
    dt.evaluate(network(), LOADERS["stream"](4 + 4 * dt.rank()))


def other_metrics() -> None:
    dt.evaluate(network(), LOADERS["plain"](8), {f"right {dt.rank()}": lambda output, target: target})


def batch_statistics() -> None:
    dt.evaluate(nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False)).double(), LOADERS["plain"](8))


def divided_already() -> None:
    sampler = torch.utils.data.DistributedSampler(data(8), num_replicas=dt.world(), rank=dt.rank())
    dt.evaluate(network(), DataLoader(data(8), batch_size=4, sampler=sampler))


def empty() -> None:
    dt.evaluate(network(), DataLoader(Subset(data(8), []), batch_size=4))


REFUSALS: dict[Callable[[], None], tuple[type[Exception], str]] = {
    other_weights: (dt.DesyncError, "sums of 0.weight"),
    other_buffers: (dt.DesyncError, "sums of 0.running_mean"),
    other_samples: (dt.DesyncError, "loader samples"),
    other_data: (dt.DesyncError, "dataset_length: rank 0 8, rank 1 9"),
    other_stream: (dt.DesyncError, "rank 0: 2, rank 1: 3"),
    other_metrics: (dt.DesyncError, "metrics: rank 0 ['right 0']"),
    batch_statistics: (dt.UsageError, "track_running_stats=False"),
    divided_already: (dt.UsageError, "already divides"),
    empty: (dt.UsageError, "without batches"),
}


def refused() -> Iterator[dict[str, Any]]:
    """One row for each, as the pool writes them: no difference where it was refused in the right words."""
    for attempt, (kind, words) in REFUSALS.items() if dt.world() > 1 else ():
        said = "nothing"
        try:
            attempt()
        except kind as error:
            said = str(error)
        wrong = float(words not in said or "needed:" not in said or "do:" not in said)
        yield {"case": f"refuses {attempt.__name__}", "difference": wrong, "agree": True, "said": said}
