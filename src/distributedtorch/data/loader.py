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
from distributedtorch.data.indexed import Indexed, Pieces
from distributedtorch.data.partition import Part
from distributedtorch.data.position import Position
from distributedtorch.data.shares import Division
from distributedtorch.data.stream import Stream
from distributedtorch.data.streamed import Streamed
from distributedtorch.data.whole import Whole

OnBatch = Callable[[Share, Any], None]
BeforeBatch = Callable[[], None]


class Making:
    """A `with` block in which a batch is made: loaders that are walked for that stay as they are."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Source(Protocol):
    """How one kind of loader is divided."""

    @property
    def batch_global(self) -> int | None:
        """Rows of a full global batch, if known."""

    @property
    def note(self) -> str:
        """What was done, in a few words."""

    def begin(self, skip: int = 0, number: int = 0, *, whole: bool = False) -> Pieces:
        """Start an epoch behind its first `skip` batches, with batch `number` of the run.

        `whole`: every rank has all rows of each batch, until the walk is told to divide them.
        """

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
    choose: Callable[[Loader], Iterator[Any]] | None = None,
    making: Making | None = None,
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
        choose: What a walk is, where that is decided when it begins; without it, an epoch.
        making: Entered while a batch is made.

    Raises:
        UsageError: The loader already divides, has no batches, or cannot be given another batch size.
    """
    if isinstance(loader, Loader):
        given = "a loader that is already distributed was given again"
        raise UsageError(explain(given, "each loader once", "use the object that came back from the first call"))
    survey.refuse(loader, world)
    own_way = not isinstance(loader, DataLoader) or iterates_its_own_way(loader)
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
    divided = Loader(
        loader, source, place, (before_batch, on_batch, at_end), changed, division=division, batch_dim=batch_dim
    )
    divided.choose, divided.making = choose or Loader.epoch, making or divided.making
    return divided


def iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader does something at `iter` that a plain one over the same parts would not."""
    kind = type(loader)
    overridden = kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
    return overridden or isinstance(loader.dataset, IterDataPipe)


class Loader:
    """What the user gets back: iterates and has `len` as before, and hands out this rank's rows.

    Attributes of the user's loader (`dataset`, `sampler`, `batch_size`, ...) can be read and set here as there.
    """

    _OWN = (
        *("_loader", "_source", "_changed", "calls", "cursor", "place", "division", "batch_dim"),
        *("choose", "making"),
    )

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
        self.choose: Callable[[Loader], Iterator[Any]] = Loader.epoch
        self.making = Making()

    @property
    def guesses(self) -> bool:
        """Whether finished batches are cut along their first dimension because nobody said another."""
        return isinstance(self._source, Whole) and self.batch_dim is None

    @property
    def user(self) -> Any:
        """The user's loader."""
        return self._loader

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

    def __iter__(self) -> Iterator[Any]:
        return self.choose(self)

    def epoch(self, source: Loader | None = None) -> Epoch:
        """A walk over this rank's rows, which counts; `source` makes the batches, in place of this one."""
        with self.making:
            return self.walked(*self.place.begin((source or self)._begin))

    def walked(self, pieces: Pieces, number: int) -> Epoch:
        """An epoch that is handed out."""
        return self.place.walk(Epoch(self, pieces, number), self.calls[2])  # type: ignore[no-any-return]

    def whole(self, on_batch: OnBatch) -> Pass:
        """A walk over whole batches, which does not count."""
        with self.making:
            return Pass(self, self.place.begin_whole(self.begin_whole), Cursor(), on_batch)

    def begin_whole(self, skip: int) -> Pieces:
        """Whole batches behind the first `skip`."""
        return self._source.begin(skip, self.cursor.batches, whole=True)

    def _begin(self, skip: int) -> Pieces:
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

    def __init__(self, loader: Loader, pieces: Pieces, number: int) -> None:
        self._loader = loader
        self._pieces = pieces
        self._number = number
        self.stale = False
        """Whether the loader was put to another place since."""

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if self.stale:
            raise UsageError(STALE)
        before, on_batch, at_end = self._loader.calls
        before()
        try:
            with self._loader.making:
                rows, rows_global, batch, copies, proof = next(self._pieces)
        except StopIteration:
            self._loader.place.left(self)
            at_end()
            raise
        share = self._loader.cursor.advance(rows, rows_global, self._number, copies=copies, proof=proof)
        on_batch(share, batch)
        return batch

    def __len__(self) -> int:
        return len(self._loader)


class Pass:
    """One walk over a loader's whole batches."""

    def __init__(self, loader: Loader, pieces: Pieces, cursor: Cursor, on_batch: OnBatch) -> None:
        self.loader, self.pieces, self.cursor = loader, pieces, cursor
        self._on_batch = on_batch

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        with self.loader.making:
            rows, rows_global, batch, copies, proof = next(self.pieces)
        self._on_batch(
            self.cursor.advance(rows, rows_global, self.cursor.epoch, copies=copies, proof=proof),
            batch,
        )
        return batch

    def __len__(self) -> int:
        return len(self.loader)


STALE = explain(
    "dt.load inside a loop over a loader that it has put to another place",
    "a new loop over the loader",
    "leave the loop after dt.load and begin again: `for batch in loader` then goes on from the loaded place",
)
