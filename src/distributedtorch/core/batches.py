"""Which batch a backward belongs to, and so how many rows it is the mean of.

In a plain loop it is the batch handed out last. Where batches are pulled ahead (a list of them, a prefetching loop), or
others were handed out for evaluation in between, the tensors of each batch are remembered, and the models' forwards say
which one they were given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import hooked


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows (or units) a loss is the mean of, here and everywhere."""

    mine: float
    everywhere: float
    batch: int = -1
    """Number of the global batch in the run; -1 when no loader told."""
    within: int = 0
    """Number of the global batch in its epoch, from 1; 0 when no loader told."""
    last: bool = False
    """Whether it is the last batch of its epoch."""
    source: int = 0
    """Which loader it came from."""
    summed: bool = False
    """Whether the loss is a sum over them."""
    copies: int = 1
    """How many ranks have each row; `mine` counts them in parts."""
    proof: float = -1.0
    """What must be the same on all ranks, where each has read the whole batch; below 0: nothing."""

    @property
    def share(self) -> float:
        """The part of the global batch that is here."""
        return self.mine / self.everywhere


@dataclass(eq=False)
class Offer:
    """A whole batch of a loader that was not given: the loop may be fed by it, or look at it for something else."""

    rows: Rows
    taken: bool = False
    """Whether a backward was about it alone."""


class Batches:
    """The batches handed out and the one in use."""

    def __init__(self) -> None:
        self.present: Rows | None = None
        """The batch in use: of the last forward that was recognised, else the last one handed out."""
        self.settled: Rows | None = None
        """What the last backward was about."""
        self.offers: list[Offer] = []
        """Since the last batch that was handed out, where nobody has taken them back."""
        self.models: list[nn.Module] = []
        self.first: Callable[[], None] = lambda: None
        """Called when loaders have begun to hand batches out."""
        self._held: dict[int, set[float]] = {}
        """Loaders whose epoch is over though somebody has kept batches, with the shares of these."""
        self._handed: dict[int, list[Rows]] = {}
        self._tags: dict[int, tuple[weakref.ref[Tensor], Rows]] = {}
        self._ahead: dict[int, set[float]] = {}
        """Loaders that were pulled ahead, with the shares of their batches."""
        self._aside: list[Rows] = []
        """Batches handed out without gradients since the last one with: most likely an evaluation's."""
        self._hooks: dict[nn.Module, Callable[[], None]] = {}
        """What removes them from the modules whose forwards are looked at."""
        self._recognised = False

    @property
    def latest(self) -> Rows | None:
        """The batch a value computed now is most likely about."""
        if self._aside and not torch.is_grad_enabled():
            return self._aside[-1]
        return self.offers[0].rows if self.offers and not self._handed else self.present

    @property
    def evaluated(self) -> bool:
        """Whether the batches since the last backward were whole ones without gradients."""
        return bool(self._aside) and self._aside[-1].copies > 1

    def arrived(self, rows: Rows, batch: Any) -> None:
        """A loader hands out a batch."""
        self._tag(rows, batch)
        if rows.copies == 1:
            self.first()
        if not torch.is_grad_enabled():
            self._aside.append(rows)
            self._listen(self.models)
            return
        self.present, self._recognised, self._aside, self.offers = rows, False, [], []
        self._held.pop(rows.source, None)
        handed = self._handed.setdefault(rows.source, [])
        handed.append(rows)
        if len(handed) > 1:
            self._listen([module for model in self.models for module in model.modules()])
            self._ahead.setdefault(rows.source, {handed[0].share}).add(rows.share)

    def offered(self, rows: Rows) -> Offer:
        """A loader that was not given hands out a whole batch."""
        self.first()
        offer = Offer(rows)
        self.offers.append(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """A whole batch is not in use any more."""
        if offer in self.offers:
            self.offers.remove(offer)

    def walked(self, source: int) -> None:
        """A loader's epoch is over: where somebody has kept its batches, they may come again without its doing."""
        kept = {rows for ref, rows in list(self._tags.values()) if rows.source == source}
        shares = {rows.share for rows in kept}
        if len(shares) > 1:
            self._held[source] = shares
            self._listen([module for model in self.models for module in model.modules()])

    def _tag(self, rows: Rows, batch: Any) -> None:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                key = id(leaf)
                self._tags[key] = (weakref.ref(leaf, lambda _, key=key: self._tags.pop(key, None)), rows)  # type: ignore[misc]

    def _listen(self, modules: Iterable[nn.Module]) -> None:
        """Look at the inputs of these modules' forwards from now on."""

        def look(_: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self.used([*args, *kwargs.values()])

        for module in modules:
            if module not in self._hooks:
                self._hooks[module] = hooked(module, module.register_forward_pre_hook(look, with_kwargs=True))

    def close(self) -> None:
        """Look at nothing any more."""
        for remove in self._hooks.values():
            remove()

    def used(self, values: Iterable[Any]) -> None:
        """A forward takes these values: if they belong to a batch, that batch is in use."""
        for value in values:
            known = self._tags.get(id(value))
            if known is not None and known[0]() is value:
                self.present, self._recognised = known[1], True
                return

    def done(self) -> None:
        """The batch handed out last is done with, whether or not a backward came of it."""
        self._handed, self._aside = {}, []

    def settle(self, *, explicit: bool) -> Rows | None:
        """At a backward: the rows its loss is over; refuses where that cannot be told and was not said."""
        self.settled = self._settle(explicit)
        return self.settled

    def _settle(self, explicit: bool) -> Rows | None:
        handed, self._handed = self._handed, {}
        aside, self._aside = self._aside, []
        if self.offers and not handed:
            self.offers[0].taken = len(self.offers) == 1
            return self.offers[0].rows
        if handed or self.present is not None:  # what stayed whole beside it was an evaluation's
            aside = [given for given in aside if given.copies == 1]
        rows = self.present or (aside[-1] if aside else None)
        recognised, self._recognised = self._recognised, False
        if rows is None or explicit:
            return rows
        if not recognised and len(self._ahead.get(rows.source, ())) > 1:
            raise UsageError(_AHEAD)
        if not recognised and len(self._held.get(rows.source, ())) > 1:
            raise UsageError(_AGAIN)
        if not recognised and len({given.share for given in [rows, *aside]}) > 1:
            raise UsageError(_BETWEEN)
        self.present = rows
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
                "use batch sizes that the number of workers divides, drop_last=True and no `balance`, "
                "or dt.weight each loss",
            )
        )


_BETWEEN = explain(
    "batches with other shares of rows were taken under torch.no_grad between a batch and its backward, and the model "
    "was given other tensors than the loader made (moved or changed on the way)",
    "to know which batch a loss belongs to, to weigh it exactly",
    "evaluate before the next batch is taken from the loader, or loss = dt.weight(loss, rows here)",
)
_AGAIN = explain(
    "batches of an epoch that is over are used again (itertools.cycle?), with unequal rows on this rank, and the model "
    "was given other tensors than the loader made (moved or changed on the way)",
    "to know which batch a loss belongs to, to weigh it exactly",
    "write `while True:` around `for batch in loader:`, use a batch size that the number of workers divides, or "
    "loss = dt.weight(loss, rows here)",
)
_AHEAD = explain(
    "batches were taken from the loader ahead of their use, with unequal rows on this rank, and the model was given "
    "other tensors than the loader made (moved or changed on the way)",
    "to know which batch a loss belongs to, to weigh it exactly",
    "use a batch size that the number of workers divides, drop_last=True and no `balance`, or "
    "loss = dt.weight(loss, rows here)",
)
