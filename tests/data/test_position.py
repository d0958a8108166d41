"""A loader that goes on where another stood hands out the rest of the epoch, and then the epochs that would follow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from distributedtorch.data.loader import Loader, divide
from distributedtorch.data.stream import Stream, as_plain, from_plain, install

DATA = TensorDataset(torch.arange(37))


class Drawing(Sampler[int]):
    """A user's own: draws from Python's random state while it is walked."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(37):
            yield random.randrange(37)

    def __len__(self) -> int:
        return 37


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(37))


KINDS = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True),
    "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "own generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "replacement, own generator": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, replacement=True, generator=torch.Generator().manual_seed(5))
    ),
    "own sampler": lambda: DataLoader(DATA, 4, sampler=Drawing()),
    "stream": lambda: DataLoader(Flow(), 4),
    "stream, workers": lambda: DataLoader(Flow(), 4, num_workers=2),
    "a list": lambda: [torch.arange(k, k + 4) for k in range(0, 36, 4)],
}


def made(kind: str, world: int, seed: int) -> tuple[Loader, Stream | None]:
    torch.manual_seed(seed)
    random.seed(seed)
    stream = Stream() if world > 1 else None
    loader = KINDS[kind]()
    return divide(loader, rank=0, world=world, stream=stream, on_batch=lambda share, batch: None), stream


def taken(batch: Any) -> list[int]:
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def state(stream: Stream | None) -> Any:
    return as_plain(stream.state if stream is not None else Stream().state)


WHEN = [(world, after) for world in (1, 2) for after in (0, 1, 4, "end", "left")]
FEW = [(1, 4), (2, 1), (2, "end")]  # workers take time
CASES = [(kind, *when) for kind in KINDS for when in (FEW if "workers" in kind else WHEN)]


@pytest.mark.parametrize(("kind", "world", "after"), CASES)
def test_goes_on(kind: str, world: int, after: int | str) -> None:
    loader, stream = made(kind, world, seed=1)
    first = [taken(batch) for batch in loader]
    walk = iter(loader)
    count = {"end": len(first), "left": 2}.get(after, after)  # type: ignore[call-overload]
    for _ in range(count):
        next(walk)
    if after == "end":
        assert next(walk, None) is None
    if after in ("end", "left"):
        del walk
    saved = json.loads(json.dumps([loader.place.state_dict(), state(stream)]))
    rest = [] if after in ("end", "left") else [taken(batch) for batch in walk]
    expected = [rest, *([taken(batch) for batch in loader] for _ in range(2))]

    again, other = made(kind, world, seed=2)  # another seed: nothing may come from it
    again.place.load_state_dict(saved[0])
    if other is not None:
        other.state = from_plain(saved[1])
    else:
        install(from_plain(saved[1]), full=True)
    found = [[taken(batch) for batch in again] for _ in range(2 + (after not in ("end", "left")))]
    assert found == (expected if after not in ("end", "left") else expected[1:])
    assert again.cursor.state_dict() == loader.cursor.state_dict()


def test_without_the_state_it_would_not() -> None:
    """The twin: the same, but the epoch is not begun from the state it began with."""
    loader, stream = made("shuffled", 2, seed=1)
    walk = iter(loader)
    next(walk)
    saved = loader.place.state_dict()
    assert stream is not None
    saved["began"]["order"] = as_plain(stream.state)
    rest = [taken(batch) for batch in walk]
    again, _ = made("shuffled", 2, seed=2)
    again.place.load_state_dict(saved)
    assert [taken(batch) for batch in again] != rest
