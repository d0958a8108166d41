"""Ranks played one after the other in one process: each in a fresh random state, as separate processes would be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from distributedtorch.data.cursor import Share
from distributedtorch.data.loader import Loader, divide
from distributedtorch.data.stream import Stream

Make = Callable[[], Any]


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return int(index)


class Noisy(Numbers):
    """A sample and three draws, one from each global state: augmentation."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return index, torch.rand(()), random.random(), numpy.random.rand()


class Flow(IterableDataset[int]):
    """0 .. length-1, divided over workers the way torch's documentation does, optionally shuffled by `random`."""

    def __init__(self, length: int, shuffle: bool = False) -> None:
        self.numbers = list(range(length))
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is None or info.dataset is self, "get_worker_info().dataset must be the user's dataset"
        mine = self.numbers if info is None else self.numbers[info.id :: info.num_workers]
        if self.shuffle:
            mine = [mine[i] for i in torch.randperm(len(mine)).tolist()]
            random.shuffle(mine)
        yield from mine


class PythonShuffle(Sampler[int]):
    """A custom sampler that draws from Python's and numpy's global state, some of it as soon as `iter` is called."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return (i for i in numpy.array(order)[numpy.random.permutation(self.length)].tolist())


def keep(items: Sequence[Any]) -> list[Any]:
    """A collation that leaves samples as they are."""
    return list(items)


def fresh(seed: int = 5) -> None:
    """The random state of a process that has just seeded itself."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def plain(make: Make, epochs: int = 3) -> list[list[Any]]:
    """What one process without the library sees: epochs of batches."""
    fresh()
    loader = make()
    return [[batch for batch in loader] for _ in range(epochs)]


@dataclass
class Rank:
    """One rank's loader and what it got."""

    loader: Loader
    shares: list[Share] = field(default_factory=list)
    epochs: list[list[Any]] = field(default_factory=list)


def join(make: Make, rank: int, world: int, **options: Any) -> Rank:
    """One rank of a run, before its first batch; its own global random state differs from the stream's."""
    fresh()
    stream = options.pop("stream", None) or Stream()
    shares: list[Share] = []
    loader = divide(
        make(), rank=rank, world=world, stream=stream, on_batch=lambda share, batch: shares.append(share), **options
    )
    fresh(1000 + rank)
    return Rank(loader, shares)


def run(make: Make, world: int, epochs: int = 3, **options: Any) -> list[Rank]:
    """All ranks of a run, each drawing from its own state between batches, like dropout would."""
    ranks = []
    for index in range(world):
        rank = join(make, index, world, **options)
        for _ in range(epochs):
            rank.epochs.append([])
            for batch in rank.loader:
                rank.epochs[-1].append(batch)
                torch.rand(index + 1), random.random(), numpy.random.rand(index + 1)
        ranks.append(rank)
    return ranks


def together(ranks: list[Rank]) -> list[list[list[Any]]]:
    """The global batches: the ranks' real rows in rank order. Ranks must agree on the number of batches."""
    for rank in ranks:
        assert [len(e) for e in rank.epochs] == [len(e) for e in ranks[0].epochs]
        assert [(s.batch, s.epoch, s.rows_global, s.first_sample) for s in rank.shares] == [
            (s.batch, s.epoch, s.rows_global, s.first_sample) for s in ranks[0].shares
        ]
    shares = [iter(rank.shares) for rank in ranks]
    united = []
    for epoch in zip(*(rank.epochs for rank in ranks), strict=True):
        united.append([])
        for parts in zip(*epoch, strict=True):
            heads = [next(share) for share in shares]
            for part, head in zip(parts, heads, strict=True):
                assert len(part) == max(head.rows, min(1, head.rows_global))
            united[-1].append([row for part, head in zip(parts, heads, strict=True) for row in list(part)[: head.rows]])
            assert sum(head.rows for head in heads) == heads[0].rows_global
    return united


def loader_of(length: int, batch: int = 4, **options: Any) -> Make:
    """A maker of DataLoaders over `Numbers` that leave samples as they are."""
    return lambda: DataLoader(Numbers(length), batch_size=batch, collate_fn=keep, **options)
