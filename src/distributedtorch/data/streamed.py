"""IterableDataset: every rank reads the whole stream, groups it into global batches and keeps its own rows.

A stream has no indices to divide, so reading (and what the dataset does to each sample) is repeated on every rank;
collation, and everything after it, is on this rank's rows only. Nothing travels. Streams that are costly to read are
better given as a map-style dataset. With workers each worker forms its own global batches, as torch's would, and all
ranks' workers read with the same random state; collation draws from a state of its own on each rank. Under `balance`
the shares of streams with workers change between epochs only, and not at all where the workers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice, repeat
from math import ceil
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distributedtorch.core.proof import proof_of
from distributedtorch.data.indexed import Piece, Pieces, in_order_note, loading_options
from distributedtorch.data.partition import Part
from distributedtorch.data.stream import DividedLoader, Stream, drawing
from distributedtorch.data.worker import reseed


class Streamed:
    """A DataLoader over an IterableDataset whose global batches are divided as they are read."""

    def __init__(self, loader: DataLoader[Any], part: Part, stream: Stream | None, batch: int | None) -> None:
        assert loader.batch_size is not None
        self._loader = loader
        self._part = part
        self._stream = stream
        self._rebatched = batch
        self.batch_global: int | None = batch or loader.batch_size
        self._kept: dict[bool, DataLoader[Any]] = {}
        """Whose workers stay: by whether batches are whole, which their workers are told once."""
        self._proves = part.world > 1

    def begin(self, skip: int = 0, number: int = 0, *, whole: bool = False) -> Pieces:
        """Start one epoch: torch draws the workers' seed, and without workers the dataset's `iter` runs.

        `skip` batches are read and thrown away: a stream has no other way to come to a place.
        """
        inner = self._kept[whole] if whole in self._kept else self._build()
        groups: Any = inner.dataset
        groups.number, groups.part = number - skip, self._part.undivided() if whole else self._part
        groups.proves, self._proves = self._proves, self._proves and whole
        if inner.persistent_workers:
            self._kept[whole] = inner
        with drawing(self._stream, full=True):
            pieces = Flowing(iter(inner), groups, self._part)
        for _ in range(skip):
            if next(pieces, None) is None:  # a saved place may be behind the end
                break
        return pieces

    def __len__(self) -> int:
        if self._rebatched is None:
            return len(self._loader)
        count = len(self._loader.dataset) / self._rebatched  # type: ignore[arg-type]
        return int(count) if self._loader.drop_last else ceil(count)

    @property
    def note(self) -> str:
        """What was done, for the printed line."""
        if self._part.world == 1:
            return f"{self.batch_global} global, from a stream{in_order_note(self._loader)}"
        divided = f"stream read by every rank, rows divided{self._part.note}"
        return f"{self.batch_global} global: {divided}{in_order_note(self._loader)}"

    def _build(self) -> DataLoader[Any]:
        user = self._loader
        assert self.batch_global is not None
        return DividedLoader(
            Groups(user.dataset, self.batch_global, user.drop_last, self._part, self._stream),
            batch_size=None,
            collate_fn=Collate(user.collate_fn),
            generator=user.generator,
            **loading_options(user),
        )


class Flowing:
    """One walk over the loader around `groups`."""

    def __init__(self, produced: Iterator[Piece], groups: Groups, part: Part) -> None:
        self._produced = produced
        self._groups = groups
        self._part = part

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._produced)

    def divide(self) -> None:
        """Divide the groups that are not read yet, but for those that workers read: they go on as they began."""
        self._groups.part = self._part


class Groups(IterableDataset[Piece]):
    """The user's stream in global batches, cut to this rank's samples."""

    def __init__(self, dataset: Any, size: int, drop_last: bool, part: Part, stream: Stream | None) -> None:
        self.user_dataset = dataset
        self.size = size
        self.drop_last = drop_last
        self.part = part
        self._stream = stream
        self._in_worker = False
        self.number = 0
        """Number in the run of the first batch of the next walk."""
        self.proves = False
        """Whether the next walk's first batch is to be the same on all ranks."""

    def __iter__(self) -> Iterator[Piece]:
        self._enter_worker()
        with drawing(self._stream, full=True):
            samples = iter(self.user_dataset)
        # A worker does not know how many batches the others make: it divides all of its own like the first.
        numbers = repeat(self.number) if self._in_worker else count(self.number)
        return Grouped(self, samples, self._stream, numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    def _enter_worker(self) -> None:
        """In a worker, reading continues from the worker's seed, equal on all ranks; the rest gets a seed by rank."""
        if get_worker_info() is None or self._in_worker:
            return
        self._in_worker = True
        self._stream = None
        if self.part.world > 1:
            self._stream = Stream()
            reseed(self.part.rank)


class Grouped:
    """One walk over the stream."""

    def __init__(self, groups: Groups, samples: Iterator[Any], stream: Stream | None, numbers: Iterator[int]) -> None:
        self._groups = groups
        self._samples = samples
        self._stream = stream
        self._numbers = numbers
        self._ended = False
        self._proves = groups.proves

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._ended:
            raise StopIteration
        with drawing(self._stream, full=True):
            group = list(islice(self._samples, self._groups.size))
        self._ended = len(group) < self._groups.size
        if not group or (self._ended and self._groups.drop_last):
            raise StopIteration
        proof, self._proves = proof_of(group) if self._proves else -1.0, False
        part = self._groups.part
        return Piece(*part.take(group, next(self._numbers)), part.copies, proof)


class Collate:
    """The user's collation, on the samples only; the sizes travel beside them."""

    def __init__(self, user: Callable[[Any], Any]) -> None:
        self.user = user

    def __call__(self, piece: Any) -> Piece:
        return piece._replace(batch=self.user(piece.batch))  # type: ignore[no-any-return]
