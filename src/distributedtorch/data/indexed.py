"""Map-style DataLoader: the global list of indices is drawn on every rank, and each rank loads only its own rows.

Each rank draws the same global batches of indices from the shared stream and keeps its contiguous piece before any
sample is read, so a sample is loaded once over all ranks. Nothing travels. Indices are drawn in the main process, in
the order torch draws them: the sampler's `iter`, the seed for the workers, then one batch of indices at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distributedtorch.data import worker
from distributedtorch.data.partition import Part
from distributedtorch.data.stream import DividedLoader, Stream, drawing


class Piece(NamedTuple):
    """This rank's part of a global batch."""

    rows: float
    """Real rows of this rank."""
    rows_global: int
    batch: Any
    copies: int = 1
    """How many ranks have each row; `rows` counts them in parts."""
    proof: float = -1.0
    """What must be the same on all ranks, where each has read the whole batch; below 0: nothing."""


class Pieces(Protocol):
    """One walk: this rank's part of each global batch."""

    def __next__(self) -> Piece:
        """The next one."""

    def divide(self) -> None:
        """Divide what was not begun to be loaded, where batches stayed whole so far."""


Draw = Callable[[], AbstractContextManager[None]]

TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Indexed:
    """A map-style DataLoader whose batches of indices are divided."""

    def __init__(self, loader: DataLoader[Any], part: Part, stream: Stream | None, batch: int | None) -> None:
        self._loader = loader
        self._part = part
        batches: Any = loader.batch_sampler
        self._batches = batches if batch is None else BatchSampler(batches.sampler, batch, batches.drop_last)
        self._draw: Draw = partial(drawing, stream, not draws_from_torch_only(self._batches))
        self._kept: tuple[DataLoader[Any], Indices] | None = None

    def begin(self, skip: int = 0, number: int = 0, *, whole: bool = False) -> Pieces:
        """Start one epoch: everything torch draws at `iter` is drawn now. `skip` batches are drawn but never loaded."""
        inner, indices = self._kept or self._build()
        indices.skip, indices.number = skip, number
        indices.part = self._part.undivided() if whole else self._part
        if inner.persistent_workers:
            self._kept = inner, indices
        with self._draw():
            produced = iter(inner)
            indices.pass_over()
        return Paired(produced, indices, self._part)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def batch_global(self) -> int | None:
        """Rows of a full global batch, where the batch sampler says so."""
        size = getattr(self._batches, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def note(self) -> str:
        """What was done, for the printed line."""
        size, world = self.batch_global, self._part.world
        text = f"batches of {type(self._batches).__name__} divided over {world}" if size is None else f"{size} global"
        if size is not None and world > 1:
            text += f" = {self._part.sizes(size)}"
        return text + self._part.note + in_order_note(self._loader)

    def _build(self) -> tuple[DataLoader[Any], Indices]:
        """A fresh DataLoader, so that what the user set on theirs since the last epoch holds."""
        user = self._loader
        # Rank 0 keeps the seed that one process would give its workers; the others draw from one of their own.
        private = torch.Generator() if self._part.rank > 0 else None
        indices = Indices(self._batches, self._part, self._draw, user.generator, private)
        inner: DataLoader[Any] = DividedLoader(
            user.dataset,
            batch_sampler=indices,
            generator=user.generator if private is None else private,
            collate_fn=user.collate_fn,
            **loading_options(user),
        )
        return inner, indices


class Indices:
    """The user's batch sampler, cut to this rank's rows; a batch sampler itself."""

    def __init__(
        self,
        batches: Iterable[Any],
        part: Part,
        draw: Draw,
        generator: torch.Generator | None,
        private: torch.Generator | None,
    ) -> None:
        self._batches = batches
        self.part = part
        self._draw = draw
        self._generator = generator
        self._unseeded = private
        self._drawn: Iterator[Any] = iter(())
        self.skip = 0
        """Batches to leave out at the beginning of the next iteration."""
        self.number = 0
        """Number in the run of the first batch that the next iteration does not leave out."""
        self.sizes: deque[tuple[float, int, int]] = deque()
        """Rows here and everywhere, and on how many ranks each is, of the batches drawn but not yet handed out, in
        order; a new object for each iteration."""

    def __iter__(self) -> Iterator[Any]:
        with self._draw():
            drawn = iter(self._batches)
            # torch draws the workers' seed right after the first `iter` of a DataLoader's iterator, and once only.
            if self._unseeded is not None:
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
                self._unseeded.manual_seed((seed + self.part.rank) % 2**63)
                self._unseeded = None
        self.sizes, self._drawn = deque(), drawn
        return self._cut(drawn, self.sizes, self.number)

    def pass_over(self) -> None:
        """Draw what is to be left out, once: after torch has drawn what it draws at `iter`, before the next batch."""
        skip, self.skip = self.skip, 0
        for _ in range(skip):
            if next(self._drawn, self) is self:  # no more: a saved place may be behind the end
                return

    def _cut(self, drawn: Iterator[Any], known: deque[tuple[float, int, int]], first: int) -> Iterator[Any]:
        for number in count(first):
            with self._draw():
                self.pass_over()
                try:
                    batch = next(drawn)
                except StopIteration:
                    return
            rows, rows_global, mine = self.part.take(batch, number)
            known.append((rows, rows_global, self.part.copies))
            yield mine


class Paired:
    """Batches from torch's iterator, each with the sizes that its indices had."""

    def __init__(self, produced: Iterator[Any], indices: Indices, part: Part) -> None:
        self._produced = produced
        self._known = indices.sizes
        self._indices = indices
        self._part = part

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            batch = next(self._produced)
        except StopIteration:
            raise
        except Exception:
            # A sample that failed to load used its indices up: a caller that goes on gets the next batch's sizes.
            if self._known:
                self._known.popleft()
            raise
        rows, rows_global, copies = self._known.popleft()
        return Piece(rows, rows_global, batch, copies)

    def divide(self) -> None:
        """Divide the batches whose indices are not drawn yet."""
        self._indices.part = self._part


def draws_from_torch_only(batches: Any) -> bool:
    """Whether nothing but torch's own samplers decides the order."""
    return type(batches) is BatchSampler and type(batches.sampler) in TORCH_SAMPLERS


def loading_options(user: DataLoader[Any]) -> dict[str, Any]:
    """How the user's DataLoader loads, apart from what it loads; order is always kept."""
    return {
        "num_workers": user.num_workers,
        "pin_memory": user.pin_memory,
        "pin_memory_device": user.pin_memory_device,
        "timeout": user.timeout,
        "worker_init_fn": worker.start(user.worker_init_fn) if user.num_workers else user.worker_init_fn,
        "multiprocessing_context": user.multiprocessing_context,
        "prefetch_factor": user.prefetch_factor,
        "persistent_workers": user.persistent_workers,
        "in_order": True,
    }


def in_order_note(user: DataLoader[Any]) -> str:
    """Says when the order of batches was made strict."""
    return "" if user.in_order else "; in_order=False set to True, ranks must meet the same batch"
