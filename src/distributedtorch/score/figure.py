"""The figures of an evaluation: a mean of per-sample values, or every one of them.

Each rank holds a sum and a count (`Mean`), or its own samples' values (`Every`); the sums travel once, at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.score.parcel import Parcel, in_order

Measure = Callable[[Any, Any], Tensor]
"""From the output and the target of a batch to one value (or one tensor of values) per sample."""


class Figure(ABC):
    """One figure: fed with the rows of this rank, combined over all ranks."""

    @abstractmethod
    def update(self, batch: int, output: Any, target: Any) -> None:
        """Count this rank's rows of a global batch; never called for a repeated row."""

    @abstractmethod
    def parcel(self) -> Parcel:
        """What this rank has to tell the others."""

    @abstractmethod
    def result(self, parcels: list[Parcel]) -> Any:
        """The figure, from all ranks' parcels."""


class Mean(Figure):
    """The mean of per-sample values over all samples, summed in double precision."""

    def __init__(self, name: str, measure: Measure) -> None:
        self.name, self.measure = name, measure
        self.total: Tensor | None = None
        self.count = 0

    def update(self, batch: int, output: Any, target: Any) -> None:
        """Add the values of these rows."""
        values = self.measure(output, target)
        part = _wide(values).sum(dim=0)
        self.total = part if self.total is None else self.total + part
        self.count += len(values)

    def parcel(self) -> Parcel:
        """The sum and the count."""
        return Parcel({"count": self.count}, [] if self.total is None else [self.total])

    def result(self, parcels: list[Parcel]) -> Any:
        """The sums of all ranks over the counts of all ranks."""
        count = sum(parcel.card["count"] for parcel in parcels)
        if count == 0:
            raise UsageError(no_samples(self.name))
        totals = [parcel.tensors[0] for parcel in parcels if parcel.tensors]
        return torch.stack([t.to(totals[0].device) for t in totals]).sum(dim=0) / count


class Every(Figure):
    """Every sample's value, in the order in which one process would see the samples."""

    def __init__(self, name: str, measure: Measure) -> None:
        self.name, self.measure = name, measure
        self.values: list[tuple[int, Tensor]] = []

    def update(self, batch: int, output: Any, target: Any) -> None:
        """Keep the values of these rows."""
        self.values.append((batch, self.measure(output, target)))

    def parcel(self) -> Parcel:
        """The values, and which global batches they are from."""
        return Parcel({"batches": [batch for batch, _ in self.values]}, [values for _, values in self.values])

    def result(self, parcels: list[Parcel]) -> Any:
        """All values."""
        values = in_order([list(zip(p.card["batches"], p.tensors, strict=True)) for p in parcels])
        if not values:
            raise UsageError(no_samples(self.name))
        return torch.cat([value.to("cpu") for value in values])


def checked(name: str, measure: Measure) -> Measure:
    """A user's measure, that must give one value per sample."""

    def measured(output: Any, target: Any) -> Tensor:
        values = measure(output, target)
        rows = length(output) if length(target) is None else length(target)
        if not isinstance(values, Tensor) or values.ndim == 0 or (rows is not None and len(values) != rows):
            seen = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UsageError(
                explain(
                    f"metric {name!r} gave {seen} for {'some' if rows is None else rows} samples",
                    "a tensor with one entry per sample: a mean over this rank's rows cannot be combined exactly",
                    'compute it per sample (reduction="none" in torch losses), or pass a torchmetrics.Metric',
                )
            )
        return values

    return measured


def length(value: Any) -> int | None:
    """How many rows a value has; None where it does not say."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, Mapping):
        found = {length(item) for item in value.values()} - {None}
        return found.pop() if len(found) == 1 else None
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def no_samples(name: str) -> str:
    """The message for a figure over nothing."""
    return explain(
        f"metric {name!r} was given no samples on any rank",
        "at least one sample that counts",
        "look at the loader's length, drop_last and ignored targets",
    )


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
