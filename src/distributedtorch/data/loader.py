"""The user's loader, divided: it still yields global batches in the same order, each rank getting its own rows.

The union of what the ranks get is exactly the batch that the one-process script would have seen, short last batches
included; a rank without rows gets one repeated sample and is told that it counts for nothing. Nothing travels between
ranks: they draw the same order from the same random stream (`stream.py`). A loader that already divides is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.data import survey
from distributedtorch.data.cursor import Cursor, Share
from distributedtorch.data.indexed import Indexed, Piece
from distributedtorch.data.partition import Part
from distributedtorch.data.position import Position
from distributedtorch.data.shares import Division
from distributedtorch.data.stream import Stream
from distributedtorch.data.streamed import Streamed
from distributedtorch.data.whole import Whole

OnBatch = Callable[[Share, Any], None]
BeforeBatch = Callable[[], None]


class Source(Protocol):
    """How one kind of loader is divided."""

    @property
    def batch_global(self) -> int | None:
        """Rows of a full global batch, if known."""

    @property
    def note(self) -> str:
        """What was done, in a few words."""

    def begin(self, skip: int = 0, number: int = 0) -> Iterator[Piece]:
        """Start an epoch behind its first `skip` batches, with batch `number` of the run."""

    def __len__(self) -> int:
        """Global batches in an epoch; TypeError where there is no telling."""


def divide(
    loader: Any,
    *,
    rank: int,
    world: int,
    stream: Stream | None,
    on_batch: OnBatch,
    before_batch: BeforeBatch = lambda: None,
    at_end: BeforeBatch = lambda: None,
    batch: int | None = None,
    reverse: bool = False,
    division: Division | None = None,
    batch_dim: int | tuple[int, ...] | None = None,
) -> Loader:
    """Divide the global batches of `loader` between ranks.

    Args:
        loader: The loader of the one-process script: a torch DataLoader, or anything that yields batches.
        rank: This rank.
        world: The number of ranks.
        stream: Where the order of data is drawn from, in the same state on all ranks; `None` draws from the global
            random state, as one process does.
        on_batch: Called with each share and its batch, right before the user gets it.
        before_batch: Called when the user asks for the next one: what was to be done with the last is done.
        at_end: Called when there is none, and when the user has let go of an epoch (`break`).
        batch: Another global batch size than the loader's own.
        reverse: Reverse the rows inside each global batch, to measure rounding noise.
        division: Who takes how many rows; without one, all ranks the same.
        batch_dim: Which dimension of a finished batch's tensors has the rows, if it was said.

    Raises:
        UsageError: The loader already divides, has no batches, or cannot be given another batch size.
    """
    if isinstance(loader, Loader):
        given = "a loader that is already distributed was given again"
        raise UsageError(explain(given, "each loader once", "use the object that came back from the first call"))
    survey.refuse(loader, world)
    own_way = not isinstance(loader, DataLoader) or _iterates_its_own_way(loader)
    if batch is not None:
        survey.check_rebatch(loader, batch, customised=own_way)
    part = Part(rank=rank, world=world, reverse=reverse, division=division, dims=batch_dim or 0)
    source: Source
    if own_way:
        source = Whole(loader, part, stream)
    elif isinstance(loader.dataset, IterableDataset):
        source = Streamed(loader, part, stream, batch)
    else:
        source = Indexed(loader, part, stream, batch)
    place = Position(loader, stream, Cursor())
    changed = {} if batch is None else {"batch_size": batch}
    return Loader(
        loader, source, place, (before_batch, on_batch, at_end), changed, division=division, batch_dim=batch_dim
    )


def _iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader does something at `iter` that a plain one over the same parts would not."""
    kind = type(loader)
    overridden = kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
    return overridden or isinstance(loader.dataset, IterDataPipe)


class Loader:
    """What the user gets back: iterates and has `len` as before, and hands out this rank's rows.

    Attributes of the user's loader (`dataset`, `sampler`, `batch_size`, ...) can be read and set here as there.
    """

    _OWN = ("_loader", "_source", "_changed", "calls", "cursor", "place", "division", "batch_dim")

    def __init__(
        self,
        loader: Any,
        source: Source,
        place: Position,
        calls: tuple[BeforeBatch, OnBatch, BeforeBatch],
        changed: dict[str, Any],
        *,
        division: Division | None,
        batch_dim: int | tuple[int, ...] | None,
    ) -> None:
        self._loader = loader
        self._source = source
        self._changed = changed
        self.calls = calls
        self.place, self.cursor = place, place.cursor
        self.division = division
        self.batch_dim = batch_dim

    @property
    def guesses(self) -> bool:
        """Whether finished batches are cut along their first dimension because nobody said another."""
        return isinstance(self._source, Whole) and self.batch_dim is None

    @property
    def note(self) -> str:
        """What was done to the user's loader, in a few words."""
        return self._source.note

    @property
    def batch_global(self) -> int | None:
        """Rows of a full global batch, if the loader says."""
        return self._source.batch_global

    def fingerprint(self) -> dict[str, str | int]:
        """What decides the batches; must be equal on all ranks."""
        return survey.fingerprint(self._loader, self.batch_global)

    def __iter__(self) -> Epoch:
        return self.place.walk(Epoch(self, *self.place.begin(self._begin)), self.calls[2])

    def _begin(self, skip: int) -> Iterator[Piece]:
        if self.division is not None:
            self.division.drawn = self.cursor.batches
        return self._source.begin(skip, self.cursor.batches)

    def __len__(self) -> int:
        return len(self._source)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in Loader._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return self._changed[name] if name in self._changed else getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Loader._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __repr__(self) -> str:
        return f"Loader({self._loader!r}: {self.note})"


class Epoch:
    """One walk over a divided loader."""

    def __init__(self, loader: Loader, pieces: Iterator[Piece], number: int) -> None:
        self._loader = loader
        self._pieces = pieces
        self._number = number
        self.stale = False
        """Whether the loader was put to another place since."""

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if self.stale:
            raise UsageError(_STALE)
        before, on_batch, at_end = self._loader.calls
        before()
        try:
            rows, rows_global, batch = next(self._pieces)
        except StopIteration:
            self._loader.place.left(self)
            at_end()
            raise
        share = self._loader.cursor.advance(rows, rows_global, self._number)
        on_batch(share, batch)
        return batch

    def __len__(self) -> int:
        return len(self._loader)


_STALE = explain(
    "dt.load inside a loop over a loader that it has put to another place",
    "a new loop over the loader",
    "leave the loop after dt.load and begin again: `for batch in loader` then goes on from the loaded place",
)
