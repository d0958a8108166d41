"""Broken builds that the equality tests must catch: each breaks one thing, for the case named with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from distributedtorch import evaluation
from distributedtorch.data.cursor import Share
from distributedtorch.score import figure, parcel, states
from tests.evaluate.cases import torchmetrics

Break = Callable[[], Any]


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(owner, name, value):
        yield


def repeated_rows_count() -> Any:
    return _patched(Share, "idle", False)


def only_this_rank() -> Any:
    return _patched(evaluation, "gather", lambda comm, name, mine: [mine])


def one_rank_twice() -> Any:
    def wrong(*given: Any) -> list[parcel.Parcel]:
        parcels = parcel.gather(*given)
        return [*parcels, parcels[0]]

    return _patched(evaluation, "gather", wrong)


def ranks_count_equally() -> Any:
    def wrong(self: figure.Mean, parcels: list[parcel.Parcel]) -> Any:
        return torch.stack([p.tensors[0] / p.card["count"] for p in parcels]).mean(dim=0)

    return _patched(figure.Mean, "result", wrong)


def in_rank_order() -> Any:
    wrong = lambda parts: [thing for mine in parts for _, thing in mine]  # noqa: E731
    return _patched(figure, "in_order", wrong)


def training_mode() -> Any:
    return _patched(evaluation, "_evaluating", lambda model: nullcontext())


def order_moved() -> Any:
    return _patched(evaluation.Stream, "load_bytes", lambda self, state: None)


def states_by_rank() -> Any:
    """Ranks counted equally in a state that is a mean."""
    combined = states._combined
    return _patched(states, "_combined", lambda values, how, rows: combined(values, how, torch.ones_like(rows)))


def torchmetrics_exchanges_too() -> Any:
    return _patched(states, "_never", lambda: True)


SABOTAGES: dict[str, tuple[Break, str]] = {
    "repeated rows count": (repeated_rows_count, "classes plain 4"),
    "only this rank": (only_this_rank, "classes plain 6"),
    "one rank twice": (one_rank_twice, "classes plain 7"),
    "ranks count equally": (ranks_count_equally, "classes plain 7"),
    "in rank order": (in_rank_order, "every score stream 7"),
    "training mode": (training_mode, "classes plain 6"),
    "order moved": (order_moved, "in training ddp"),
}
if torchmetrics is not None:
    SABOTAGES["states by rank"] = (states_by_rank, "numbers plain 7")
    SABOTAGES["torchmetrics exchanges too"] = (torchmetrics_exchanges_too, "numbers plain 6")
