"""A torchmetrics metric whose states cannot be combined: every rank updates it with the global batches, as one process.

For metrics with a tensor state without reduction (PearsonCorrCoef, or one whose author named none) and those that look
at the order of updates (Running). Each rank holds the outputs and targets of its own rows, and they travel once, at the
end: for metrics over few numbers per sample, not for images.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.score.figure import Figure, no_samples
from distributedtorch.score.parcel import Parcel, in_order
from distributedtorch.score.states import copied, is_metric


def needed(metric: Any) -> bool:
    """Whether a metric's states cannot be combined."""
    parts = [part for part in metric.modules() if is_metric(part)]
    ordered = any(kind.__name__ == "Running" for part in parts for kind in type(part).__mro__)
    return ordered or any(
        reduction is None and isinstance(part._defaults[attr], Tensor)
        for part in parts
        for attr, reduction in part._reductions.items()
    )


class Replay(Figure):
    """One metric, updated at the end with what all ranks have seen."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self.metric = copied(name, metric)
        self.batches: list[int] = []
        self.seen: list[Tensor] = []
        """Output and target in turns."""

    def update(self, batch: int, output: Any, target: Any) -> None:
        """Keep these rows."""
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            kinds = f"{type(output).__name__} and {type(target).__name__}"
            kind = type(self.metric).__name__
            raise UsageError(
                explain(
                    f"metric {self.name!r} ({kind}) has states without reduction, and is given {kinds}",
                    "states that ranks can combine, or outputs and targets that are tensors",
                    "name a dist_reduce_fx in its add_state calls, or give step= that returns tensors",
                )
            )
        self.batches.append(batch)
        self.seen += [output.cpu(), target.cpu()]

    def parcel(self) -> Parcel:
        """The rows, and which global batches they are from."""
        return Parcel({"batches": self.batches}, self.seen)

    def result(self, parcels: list[Parcel]) -> Any:
        """Update with one global batch after the other, and compute."""
        known = []
        for parcel in parcels:
            pairs = zip(parcel.card["batches"], parcel.tensors[::2], parcel.tensors[1::2], strict=True)
            known.append([(batch, (batch, output, target)) for batch, output, target in pairs])
        rows = in_order(known)
        if not rows:
            raise UsageError(no_samples(self.name))
        self.metric.to("cpu")
        for _, group in groupby(rows, key=lambda row: row[0]):
            _, outputs, targets = zip(*group, strict=True)
            self.metric.update(torch.cat(outputs), torch.cat(targets))
        return self.metric.compute()
