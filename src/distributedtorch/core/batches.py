"""Which batch a backward belongs to, and so how many rows it is the mean of.

In a plain loop it is the batch handed out last. Where batches are pulled ahead (a list of them, a prefetching loop) the
tensors of each batch are remembered, and the models' forwards say which one they were given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributedtorch.core.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows (or units) a loss is the mean of, here and everywhere."""

    mine: float
    everywhere: float
    batch: int = -1
    """Number of the global batch in the run; -1 when no loader told."""
    last: bool = False
    """Whether it is the last batch of its epoch."""
    source: int = 0
    """Which loader it came from."""

    @property
    def share(self) -> float:
        """The part of the global batch that is here."""
        return self.mine / self.everywhere


class Batches:
    """The batches handed out and the one in use."""

    def __init__(self) -> None:
        self.present: Rows | None = None
        """The batch in use: of the last forward that was recognised, else the last one handed out."""
        self.models: list[nn.Module] = []
        self._handed: dict[int, list[Rows]] = {}
        self._tags: dict[int, tuple[weakref.ref[Tensor], Rows]] = {}
        self._ahead: dict[int, set[float]] = {}
        """Loaders that were pulled ahead, with the shares of their batches."""
        self._recognised = False

    def arrived(self, rows: Rows, batch: Any) -> None:
        """A loader hands out a batch."""
        self.present, self._recognised = rows, False
        self._tag(rows, batch)
        if not torch.is_grad_enabled():
            return  # an evaluation
        handed = self._handed.setdefault(rows.source, [])
        handed.append(rows)
        if len(handed) > 1:
            if not self._ahead:
                self._listen()
            self._ahead.setdefault(rows.source, {handed[0].share}).add(rows.share)

    def _tag(self, rows: Rows, batch: Any) -> None:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                key = id(leaf)
                self._tags[key] = (weakref.ref(leaf, lambda _, key=key: self._tags.pop(key, None)), rows)  # type: ignore[misc]

    def _listen(self) -> None:
        """Look at the inputs of every forward from now on."""

        def look(_: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self.used([*args, *kwargs.values()])

        for model in self.models:
            for module in model.modules():
                module.register_forward_pre_hook(look, with_kwargs=True)

    def used(self, values: Iterable[Any]) -> None:
        """A forward takes these values: if they belong to a batch, that batch is in use."""
        for value in values:
            known = self._tags.get(id(value))
            if known is not None and known[0]() is value:
                self.present, self._recognised = known[1], True
                return

    def settle(self, *, explicit: bool) -> Rows | None:
        """At a backward: the rows its loss is over; refuses where that cannot be told and was not said."""
        handed, self._handed = self._handed, {}
        rows = self.present
        if rows is None or explicit:
            return rows
        if not self._recognised and len(self._ahead.get(rows.source, ())) > 1:
            raise UsageError(_AHEAD)
        self._recognised = False
        _one_share([given[0] for given in handed.values() if len(given) == 1])
        return rows


def _one_share(together: Sequence[Rows]) -> None:
    """Refuse a loss over batches of two loaders whose rows are divided differently."""
    if len({rows.share for rows in together}) > 1:
        said = " and ".join(f"{rows.mine:g} of {rows.everywhere:g} rows" for rows in together)
        raise UsageError(
            explain(
                f"one loss over batches of {len(together)} loaders of which this rank has {said}",
                "one share per loss, to weigh it exactly",
                "use batch sizes that the number of workers divides and drop_last=True, or dt.weight each loss",
            )
        )


_AHEAD = explain(
    "batches were taken from the loader ahead of their use, with unequal rows on this rank, and the model was given "
    "other tensors than the loader made (moved or changed on the way)",
    "to know which batch a loss belongs to, to weigh it exactly",
    "use a batch size that the number of workers divides with drop_last=True, or loss = dt.weight(loss, rows here)",
)
