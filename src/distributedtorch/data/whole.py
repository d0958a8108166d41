"""Anything else that can be iterated: every rank builds whole batches and keeps its rows.

For lists of batches, custom classes and DataLoader subclasses with an `__iter__` of their own. Each rank does the full
work of building a batch and then slices it; nothing travels. A torch DataLoader is divided earlier and cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from distributedtorch.core.batches import Rows
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import hooked
from distributedtorch.core.proof import proof_of
from distributedtorch.data.cut import divide_batch
from distributedtorch.data.indexed import Piece, Pieces
from distributedtorch.data.partition import Part
from distributedtorch.data.stream import Stream, drawing


class Whole:
    """An iterable of finished batches, cut by their leading dimension, or the one that was said."""

    def __init__(self, loader: Iterable[Any], part: Part, stream: Stream | None) -> None:
        self._loader = loader
        self._part = part
        self._stream = stream
        self._proves = part.world > 1

    def begin(self, skip: int = 0, number: int = 0, *, whole: bool = False) -> Pieces:
        """Start one pass over the user's object; `skip` batches are built and thrown away."""
        with drawing(self._stream, full=True):
            produced = iter(self._loader)
        pieces = Built(produced, self._part, self._stream, number - skip, whole=whole, proves=self._proves)
        self._proves = self._proves and whole
        for _ in range(skip):
            if next(pieces, None) is None:  # a saved place may be behind the end
                break
        return pieces

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def batch_global(self) -> int | None:
        """The object's own `batch_size`, if it has one."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def note(self) -> str:
        """What was done, for the printed line."""
        kind = type(self._loader).__name__
        what = f"{kind} iterates in its own way" if isinstance(self._loader, DataLoader) else "not a DataLoader"
        once = "; an iterator: it can be walked only once" if isinstance(self._loader, Iterator) else ""
        if self._part.world == 1:
            return what + once
        return f"{what}: every rank builds whole batches and keeps its rows{self._part.note}{once}"


class Built:
    """One pass: this rank's rows of each batch."""

    def __init__(
        self, produced: Iterator[Any], part: Part, stream: Stream | None, first: int, *, whole: bool, proves: bool
    ) -> None:
        self._produced = produced
        self._present, self._part = part.undivided() if whole else part, part
        self._stream = stream
        self._numbers = count(first)
        self._proves = proves

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        with drawing(self._stream, full=True):
            batch = next(self._produced)
        proof, self._proves = proof_of(batch) if self._proves else -1.0, False
        return Piece(*divide_batch(batch, self._present, next(self._numbers)), self._present.copies, proof)

    def divide(self) -> None:
        """Divide the batches to come."""
        self._present = self._part


def watch_dims(model: nn.Module, rows: Callable[[], Rows | None]) -> list[Callable[[], None]]:
    """Refuse batches that were cut along time: found at the first training forward of a module that has time first.

    `rows` tells what is in use of a loader whose batches were cut along their first dimension because nobody said
    another. Result: undo.
    """
    removed: list[Callable[[], None]] = []

    def stand(name: str, module: nn.Module) -> None:
        def look(_: nn.Module, args: Any, kwargs: Any) -> None:
            given, used = _time_and_rows([*args, *kwargs.values()]), rows()
            if given is None or used is None or used.mine < 2 or not (module.training and torch.is_grad_enabled()):
                return
            remove()
            if given[0] == used.mine:
                raise UsageError(_along_time(f"{name!r} ({type(module).__name__})", given))

        remove = hooked(module, module.register_forward_pre_hook(look, with_kwargs=True))
        removed.append(remove)

    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
            stand(name, module)
    return removed


def _time_and_rows(given: list[Any]) -> tuple[int, int] | None:
    """The first two dimensions of a batch of sequences."""
    first = given[0] if given else None
    if isinstance(first, nn.utils.rnn.PackedSequence):
        return len(first.batch_sizes), int(first.batch_sizes[0])
    return (first.shape[0], first.shape[1]) if isinstance(first, torch.Tensor) and first.dim() == 3 else None


def _along_time(module: str, given: tuple[int, int]) -> str:
    return explain(
        f"module {module} has time first (batch_first=False) and was given {given[0]} steps of {given[1]} rows, after "
        f"the loader's batches were cut to {given[0]} along their first dimension",
        "to know which dimension of a batch has its rows",
        "dt.distribute(..., batch_dim=1) where batches are (time, rows), batch_dim=0 where they are (rows, time)",
    )
