"""A torchmetrics metric over ranks: its states travel once and are combined by the reductions it declares.

torchmetrics' own exchange is switched off. Each rank holds the states of its own rows; ranks that had no row at all are
left out. Lists come in the order in which one process would have filled them; a "mean" counts ranks by their rows. The
user's metric is copied, so neither its state nor its settings change. Tensors without reduction: see `replay.py`. A
metric that draws (BootStrapper) is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.score.figure import Figure, length, no_samples
from distributedtorch.score.parcel import Parcel, in_order


def is_metric(thing: Any, kind: str = "Metric") -> bool:
    """Whether it is a `torchmetrics.Metric`; torchmetrics is not imported for that."""
    known = sys.modules.get("torchmetrics")
    return known is not None and isinstance(thing, getattr(known, kind))


def copied(name: str, metric: Any) -> Any:
    """A fresh metric like the given one, that exchanges nothing by itself."""
    copy = metric.clone()
    copy.reset()
    for part in copy.modules():
        if is_metric(part):
            part.distributed_available_fn = _never
            _refuse(name, part)
    return copy


class States(Figure):
    """One metric, with the metrics inside it."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self.metric = copied(name, metric)
        self.parts = [module for module in self.metric.modules() if is_metric(module)]
        self.states = [(part, attr) for part in self.parts for attr in part._reductions]
        self.rows = 0
        self.batches: list[int] = []
        self.ends: list[list[int]] = []
        """For each update, the lengths of the list states after it."""

    def update(self, batch: int, output: Any, target: Any) -> None:
        """Update this rank's states."""
        if isinstance(output, Tensor) and self.metric.device != output.device:
            self.metric.to(output.device)
        before = self._numbers()
        self.metric.update(output, target)
        for (part, attr), value in self._numbers().items():
            if before.get((part, attr), value) != value:
                raise UsageError(_undeclared(self.name, part, attr))
        self.rows += length(target) or length(output) or 1
        self.batches.append(batch)
        self.ends.append([len(value) for _, _, value in self._values() if isinstance(value, list)])

    def parcel(self) -> Parcel:
        """All states, and which list entries are from which global batch."""
        lengths, tensors = [], []
        for part, attr, value in self._values():
            entries = value if isinstance(value, list) else [value]
            if not all(isinstance(entry, Tensor) for entry in entries):
                raise UsageError(_not_tensors(self.name, part, attr))
            lengths.append(len(value) if isinstance(value, list) else -1)
            tensors += entries
        return Parcel({"rows": self.rows, "batches": self.batches, "ends": self.ends, "lengths": lengths}, tensors)

    def result(self, parcels: list[Parcel]) -> Any:
        """Compute from the states of all ranks."""
        active = [parcel for parcel in parcels if parcel.card["batches"]]
        if not active:
            raise UsageError(no_samples(self.name))
        held = [_apart(parcel) for parcel in active]
        rows = torch.tensor([parcel.card["rows"] for parcel in active], dtype=torch.float64)
        for (part, attr), values in zip(self.states, zip(*held, strict=True), strict=True):
            setattr(part, attr, _on(part.device, _combined(values, part._reductions[attr], rows)))
        for part in self.parts:
            part._update_count, part._computed = max(part._update_count, 1), None
        return self.metric.compute()

    def _numbers(self) -> dict[tuple[Any, str], float]:
        """Numbers that the metric keeps beside its states."""
        named = [(part, attr, value) for part in self.parts for attr, value in vars(part).items() if attr[0] != "_"]
        return {(part, attr): value for part, attr, value in named if type(value) in (int, float)}

    def _values(self) -> list[tuple[Any, str, Any]]:
        return [(part, attr, getattr(part, attr)) for part, attr in self.states]


class _Entries(list[tuple[int, Tensor]]):
    """A list state: each entry with the global batch it is from."""


def _apart(parcel: Parcel) -> list[Tensor | _Entries]:
    """The states of one rank."""
    states: list[Tensor | _Entries] = []
    at, number = 0, 0
    for size in parcel.card["lengths"]:
        if size < 0:
            states.append(parcel.tensors[at])
        else:
            ends = [row[number] for row in parcel.card["ends"]]
            states.append(_dated(parcel.tensors[at : at + size], parcel.card["batches"], ends))
            number += 1
        at += abs(size)
    return states


def _dated(entries: Sequence[Tensor], batches: Sequence[int], ends: Sequence[int]) -> _Entries:
    """Entries by global batch; all by the first where the list did not simply grow."""
    starts = [0, *ends[:-1]]
    if any(a > b for a, b in zip(starts, ends, strict=True)):
        return _Entries((batches[0], entry) for entry in entries)
    spans = zip(batches, starts, ends, strict=True)
    return _Entries((batch, entry) for batch, a, b in spans for entry in entries[a:b])


def _combined(values: Sequence[Tensor | _Entries], reduction: Any, rows: Tensor) -> Any:
    """One state from those of the ranks."""
    kind = getattr(reduction, "__name__", "")
    lists = [value for value in values if isinstance(value, _Entries)]
    if lists:
        flat = in_order(lists)
        as_is = reduction is None or kind == "dim_zero_cat" or len(lists) == 1
        return flat if as_is else reduction(flat)
    tensors = [value.cpu() for value in values if isinstance(value, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    if kind == "dim_zero_cat":
        return torch.cat([torch.atleast_1d(tensor) for tensor in tensors])
    stacked = torch.stack(tensors)
    if kind == "dim_zero_mean":
        shares = (rows / rows.sum()).view(-1, *[1] * (stacked.ndim - 1))
        return (stacked.double() * shares).sum(dim=0).to(stacked.dtype)
    return reduction(stacked)


def _on(device: torch.device, value: Any) -> Any:
    return [entry.to(device) for entry in value] if isinstance(value, list) else value.to(device)


def _never() -> bool:
    return False


def _refuse(name: str, part: Any) -> None:
    if any(kind.__name__ == "BootStrapper" for kind in type(part).__mro__):
        raise UsageError(
            explain(
                f"metric {name!r} is a {type(part).__name__}, which draws at every update",
                "a metric that gives the same at every number of ranks",
                "pass the metric inside it; dt.scores and dt.compare give an interval",
            )
        )


def _undeclared(name: str, part: Any, attr: str) -> str:
    return explain(
        f"metric {name!r} ({type(part).__name__}) counts in {attr!r}, which is no state of it",
        "states that ranks can combine",
        f'self.add_state("{attr}", torch.tensor(0.0), dist_reduce_fx="sum") in its __init__',
    )


def _not_tensors(name: str, part: Any, attr: str) -> str:
    return explain(
        f"metric {name!r} ({type(part).__name__}) keeps things in {attr!r} that are not tensors",
        "states that are tensors or lists of tensors, so that ranks can exchange and combine them",
        "keep tensors in its states (add_state), or compute it in one process",
    )
