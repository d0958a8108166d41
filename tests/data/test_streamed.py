"""IterableDataset: the union over ranks is what one process's DataLoader yields, with and without workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from data_ranks import Flow, fresh, join, keep, plain, run, together
from torch.utils.data import DataLoader

from distributedtorch.data import partition
from distributedtorch.data.loader import divide


def flow_of(length: int, batch: int = 4, shuffle: bool = False, **options: Any) -> Any:
    options.setdefault("collate_fn", keep)
    return lambda: DataLoader(Flow(length, shuffle), batch_size=batch, **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("length", range(0, 10))
def test_every_length_exactly_once(length: int, world: int, drop_last: bool) -> None:
    make = flow_of(length, drop_last=drop_last)
    assert together(run(make, world, epochs=2)) == plain(make, epochs=2)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("generator", [False, True])
def test_shuffled_by_the_dataset(world: int, options: dict[str, Any], generator: bool) -> None:
    def make() -> Any:
        own = torch.Generator().manual_seed(8) if generator else None
        return flow_of(27, shuffle=True, generator=own, **options)()

    assert together(run(make, world)) == plain(make)


def noisy_collate(items: Any) -> list[Any]:
    """Draws as many numbers as it has rows: ranks draw different amounts."""
    torch.rand(len(items)), [random.random() for _ in items]
    return list(items)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_collation_that_draws_does_not_change_the_order(options: dict[str, Any]) -> None:
    make = flow_of(27, 4, True, collate_fn=noisy_collate, **options)
    quiet = flow_of(27, 4, True, **options)
    assert together(run(make, 3)) == together(run(quiet, 3))


def seeds(items: Any) -> list[Any]:
    return [torch.rand(()).item() for _ in items]


def test_collation_in_workers_draws_differently_on_each_rank() -> None:
    ranks = run(flow_of(16, collate_fn=seeds, num_workers=2), 3, epochs=1)
    drawn = [{value for batch in rank.epochs[0] for value in batch} for rank in ranks]
    assert sum(map(len, drawn)) == len(set.union(*drawn))


def start_at_ten(worker: int) -> None:
    """torch's own example: the dataset is configured through get_worker_info()."""
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.numbers = [number + 10 * worker for number in info.dataset.numbers]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_worker_init_reaches_the_users_dataset(context: str) -> None:
    make = flow_of(8, num_workers=2, worker_init_fn=start_at_ten, multiprocessing_context=context)
    rank = join(make, 0, 1)
    seen = list(rank.loader)
    assert seen == plain(make, epochs=1)[0]
    assert {row for batch in seen for row in batch} == {0, 2, 4, 6, 11, 13, 15, 17}


def test_one_process_is_bit_identical() -> None:
    def walk(loader: Any) -> list[Any]:
        return [*[[batch, torch.rand(()).item()] for _ in range(2) for batch in loader], random.getstate()]

    make = flow_of(10, shuffle=True)
    fresh()
    expected = walk(make())
    fresh()
    assert walk(divide(make(), rank=0, world=1, stream=None, on_batch=lambda share, batch: None)) == expected


def test_another_batch_size_and_reverse() -> None:
    ranks = run(flow_of(27), 2, epochs=1, batch=10, reverse=True)
    assert together(ranks) == [[batch[::-1] for batch in plain(flow_of(27, 10), 1)[0]]]
    assert len(ranks[0].loader) == 3
    assert len(join(flow_of(27, drop_last=True), 0, 2, batch=10).loader) == 2


def test_len_as_before() -> None:
    assert len(join(flow_of(10), 0, 2).loader) == len(flow_of(10)()) == 3

    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    with pytest.raises(TypeError):
        len(join(lambda: DataLoader(Endless(), batch_size=2), 0, 2).loader)


def test_note_says_that_every_rank_reads() -> None:
    assert join(flow_of(8), 0, 2).loader.note == "4 global: stream read by every rank, rows divided"


def test_a_dropped_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true_rows = partition.rows
    monkeypatch.setattr(partition, "rows", lambda n, world, rank: true_rows(n, world, rank)[: max(1, n // world - 1)])
    with pytest.raises(AssertionError):
        assert together(run(flow_of(9), 2, epochs=1)) == plain(flow_of(9), epochs=1)
