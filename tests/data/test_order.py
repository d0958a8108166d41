"""The union over ranks of every batch is the batch of the untouched DataLoader, in the same order of batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from data_ranks import Make, Noisy, Numbers, PythonShuffle, fresh, join, keep, loader_of, plain, run, together
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distributedtorch.data import partition
from distributedtorch.data.loader import divide
from distributedtorch.data.stream import Stream

LENGTH = 70


class EagerBatches:
    """A batch sampler whose every `iter` draws at once from all three states, and yields batches of differing size."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(LENGTH).tolist()
        random.shuffle(order)
        cuts = sorted(numpy.random.choice(range(1, LENGTH), 9, replace=False).tolist())
        return iter([order[a:b] for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)])

    def __len__(self) -> int:
        return 10


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_sampler(make: Any) -> Any:
    return lambda **options: loader_of(LENGTH, sampler=make(), **options)()


SAMPLERS: dict[str, Any] = {
    "shuffle": lambda **options: loader_of(LENGTH, shuffle=True, **options)(),
    "shuffle_generator": lambda **options: loader_of(LENGTH, shuffle=True, generator=seeded(), **options)(),
    "loader_generator_only": with_sampler(lambda: RandomSampler(Numbers(LENGTH), generator=seeded())),
    "weighted": with_sampler(lambda: WeightedRandomSampler([float(i + 1) for i in range(LENGTH)], LENGTH)),
    "subset": with_sampler(lambda: SubsetRandomSampler(range(5, LENGTH - 8))),
    "replacement": with_sampler(lambda: RandomSampler(Numbers(LENGTH), replacement=True, num_samples=LENGTH)),
    "python": with_sampler(lambda: PythonShuffle(LENGTH)),
    "eager": lambda **options: DataLoader(Numbers(LENGTH), batch_sampler=EagerBatches(), collate_fn=keep, **options),
}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_same_batches(name: str, world: int) -> None:
    make: Make = SAMPLERS[name]
    assert together(run(make, world)) == plain(make)


@pytest.mark.parametrize(
    ("world", "persistent"),
    [*(pytest.param(world, False, marks=pytest.mark.long) for world in (1, 2, 4)), (3, False), (2, True)],
)
@pytest.mark.parametrize("name", SAMPLERS)
def test_same_batches_with_workers(name: str, world: int, persistent: bool) -> None:
    """torch draws ahead for its workers, and seeds them once or every epoch."""

    def make() -> Any:
        return SAMPLERS[name](num_workers=2, persistent_workers=persistent)

    assert together(run(make, world)) == plain(make)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_is_bit_identical(workers: int) -> None:
    """No stream at world 1: the same draws from the same global states, augmentation included, here and in workers."""

    def make() -> Any:
        return DataLoader(Noisy(10), batch_size=3, shuffle=True, num_workers=workers, collate_fn=keep)

    def walk(loader: Any) -> list[Any]:
        seen = [[batch, torch.rand(()).item(), random.random()] for _ in range(2) for batch in loader]
        return [*seen, torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]

    fresh()
    expected = walk(make())
    fresh()
    assert walk(divide(make(), rank=0, world=1, stream=None, on_batch=lambda share, batch: None)) == expected


def test_workers_draw_differently_on_each_rank() -> None:
    def make() -> Any:
        return DataLoader(Noisy(8), batch_size=4, shuffle=True, num_workers=2, collate_fn=keep)

    ranks = run(make, 2, epochs=1)
    first, second = ([sample[1:] for batch in rank.epochs[0] for sample in batch] for rank in ranks)
    assert not {float(draw) for sample in first for draw in sample} & {float(d) for sample in second for d in sample}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_loaders_that_alternate(workers: int, world: int) -> None:
    """Training and validation draw from one state in turn; a half-read epoch in between."""

    def make(length: int) -> Any:
        sampler = RandomSampler(Numbers(length), replacement=True, num_samples=length)
        return loader_of(length, sampler=sampler, num_workers=workers)()

    def walk(one: Any, two: Any) -> list[Any]:
        seen = []
        for _ in range(2):
            pair = zip(one, two, strict=False)
            seen += [next(pair), next(pair)]
            seen += list(zip(one, two, strict=False))
        return seen

    fresh()
    expected = walk(make(50), make(66))
    seen = []
    for index in range(world):
        fresh()
        stream = Stream()
        pair = [
            divide(make(n), rank=index, world=world, stream=stream, on_batch=lambda share, batch: None)
            for n in (50, 66)
        ]
        fresh(50 + index)
        seen.append(walk(*pair))
    assert all(len(parts) == len(expected) for parts in seen)
    for parts, whole in zip(zip(*seen, strict=True), expected, strict=True):
        for side in (0, 1):
            if len(whole[side]) >= world:
                assert [row for part in parts for row in part[side]] == whole[side]


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_early(workers: int) -> None:
    def make() -> Any:
        return SAMPLERS["replacement"](num_workers=workers)

    def walk(loader: Any) -> list[Any]:
        for number, batch in enumerate(loader):
            first = batch
            if number == 2:
                break
        return [first, *loader]

    fresh()
    expected = walk(make())
    ranks = [join(make, index, 2) for index in range(2)]
    seen = [walk(rank.loader) for rank in ranks]
    assert [a + b for a, b in zip(*seen, strict=True)] == expected
    assert [share.epoch for share in ranks[0].shares] == [0] * 3 + [1] * 18
    assert [share.batch for share in ranks[0].shares] == list(range(21))
    counts = {"epoch": 1, "batch": 18, "batches": 21, "samples": 12 + LENGTH, "ended": True}
    assert ranks[0].loader.cursor.state_dict() == counts


BATCH = 4


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("length", [0, *range(1, 2 * BATCH + 2)])
def test_every_length_exactly_once(length: int, world: int, drop_last: bool) -> None:
    make = loader_of(length, BATCH, drop_last=drop_last)
    assert together(run(make, world, epochs=2)) == plain(make, epochs=2)


def drop_a_row(total: int, world: int, rank: int) -> range:
    piece = TRUE_ROWS(total, world, rank)
    return piece[:-1] if rank == 0 and len(piece) > 1 else piece


def repeat_a_row(total: int, world: int, rank: int) -> range:
    piece = TRUE_ROWS(total, world, rank)
    return range(piece.start - 1, piece.stop) if rank == 1 and piece.start > 0 else piece


def swap_ranks(total: int, world: int, rank: int) -> range:
    return TRUE_ROWS(total, world, world - 1 - rank)


TRUE_ROWS = partition.rows


@pytest.mark.parametrize("sabotage", [drop_a_row, repeat_a_row, swap_ranks])
def test_a_wrong_partition_is_caught(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = loader_of(2 * BATCH + 1, BATCH)
    monkeypatch.setattr(partition, "rows", sabotage)
    with pytest.raises(AssertionError):
        assert together(run(make, 2, epochs=1)) == plain(make, epochs=1)


def test_a_rank_with_another_stream_is_caught() -> None:
    """The twin of `test_same_batches`: drawing order from each rank's own state must show."""
    make = SAMPLERS["shuffle"]

    class Own:
        state = None

        def drawing(self, full: bool) -> Any:
            return nullcontext()

    with pytest.raises(AssertionError):
        assert together(run(make, 2, stream=Own())) == plain(make)


@pytest.mark.parametrize("world", [1, 3])
def test_another_batch_size(world: int) -> None:
    make = loader_of(LENGTH, 4, shuffle=True)
    ranks = run(make, world, batch=9)
    assert together(ranks) == plain(loader_of(LENGTH, 9, shuffle=True))
    assert len(ranks[0].loader) == 8 and ranks[0].loader.batch_size == 9 and ranks[0].loader.batch_global == 9


def test_another_batch_size_of_a_given_batch_sampler() -> None:
    def make(size: int) -> Any:
        batches = BatchSampler(RandomSampler(Numbers(LENGTH)), size, True)
        return DataLoader(Numbers(LENGTH), batch_sampler=batches, collate_fn=keep)

    assert together(run(lambda: make(4), 2, batch=9)) == plain(lambda: make(9))


@pytest.mark.parametrize("world", [1, 3])
def test_reverse_keeps_the_rows_of_each_batch(world: int) -> None:
    make = loader_of(LENGTH, 9, shuffle=True)
    assert together(run(make, world, reverse=True)) == [[batch[::-1] for batch in epoch] for epoch in plain(make)]


def test_batches_as_tensors_and_tuples() -> None:
    class Odd:
        def __iter__(self) -> Iterator[Any]:
            yield torch.tensor([3, 1, 2])
            yield (5, 4)
            yield iter([6, 7, 8, 9])

    def make() -> Any:
        return DataLoader(Numbers(10), batch_sampler=Odd(), collate_fn=keep)

    assert together(run(make, 2, epochs=1)) == [[[3, 1, 2], [5, 4], [6, 7, 8, 9]]]
