"""Rows by shares add up and follow them; shares follow speeds, by bounded steps and only where it pays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import data_ranks
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from distributedtorch.core.errors import UsageError
from distributedtorch.data import shares as shares_module
from distributedtorch.data.partition import rows
from distributedtorch.data.shares import Division, adjusted, equal, rows_of

Divide = Callable[[int, Sequence[float], Sequence[float]], list[int]]


def check_rows(divide: Divide) -> None:
    """What every division must be: whole, complete, within limits, a row for each, and in proportion."""
    draw = random.Random(3)
    for _ in range(300):
        world, total = draw.randint(1, 7), draw.randint(0, 60)
        parts = [draw.choice([0.01, 0.5, 1.0, draw.random() + 1e-3]) for _ in range(world)]
        caps = [draw.choice([inf, inf, draw.randint(1, 30)]) for _ in range(world)]
        if sum(caps) < total:
            continue
        counts = divide(total, parts, caps)
        assert sum(counts) == total, (total, parts, counts)
        assert all(count <= cap for count, cap in zip(counts, caps, strict=True))
        assert total < world or min(counts) >= 1
        exact = [total * part / sum(parts) for part in parts]
        if total >= world and min(exact) >= 1 and all(e <= cap for e, cap in zip(exact, caps, strict=True)):
            assert all(abs(count - e) < 1 for count, e in zip(counts, exact, strict=True)), (exact, counts)


def test_rows_of_any_shares() -> None:
    check_rows(rows_of)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda total, parts, caps: [round(total * part / sum(parts)) for part in parts],  # does not add up
        lambda total, parts, caps: rows_of(total, parts),  # forgets limits
        lambda total, parts, caps: rows_of(total, equal(len(parts)), caps),  # forgets shares
    ],
)
def test_the_check_of_rows_can_fail(wrong: Divide) -> None:
    with pytest.raises(AssertionError):
        check_rows(wrong)


@pytest.mark.parametrize("world", range(1, 9))
def test_equal_shares_are_the_plain_partition(world: int) -> None:
    for total in range(40):
        assert rows_of(total, equal(world)) == [len(rows(total, world, rank)) for rank in range(world)]


def test_what_a_limit_leaves_goes_to_the_others_in_proportion() -> None:
    assert rows_of(40, (4, 2, 1), (10, inf, inf)) == [10, 20, 10]
    assert rows_of(10, (100, 1, 1), (inf, inf, inf)) == [8, 1, 1]
    assert rows_of(2, (1, 5, 4)) == [0, 1, 1]
    with pytest.raises(UsageError, match=r"batch of 9 rows for ranks that can take 4 \+ 4"):
        rows_of(9, (1, 1), (4, 4))


NO_CAPS = (inf, inf)


def test_shares_stay_where_little_is_gained() -> None:
    assert adjusted((0.5, 0.5), (101.0, 100.0), 48, NO_CAPS) == (0.5, 0.5)
    assert adjusted((2 / 3, 1 / 3), (2.02, 0.99), 48, NO_CAPS) == (2 / 3, 1 / 3)


def test_noise_does_not_move_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it would without the least gain."""

    def moves() -> int:
        draw, held, count = random.Random(1), (2 / 3, 1 / 3), 0
        for _ in range(50):
            new = adjusted(held, (draw.uniform(1.98, 2.02), draw.uniform(0.99, 1.01)), 480, NO_CAPS)
            count, held = count + (new != held), new
        return count

    assert moves() == 0
    monkeypatch.setattr(shares_module, "LEAST_GAIN", 0.0)
    assert moves() > 10


def test_shares_move_by_bounded_steps() -> None:
    held, seen = (0.5, 0.5), []
    for _ in range(6):
        new = adjusted(held, (10.0, 1.0), 110, NO_CAPS)
        assert all(1 / 1.75 < b / a < 1.75 for a, b in zip(held, new, strict=True))  # 1.5, then together 1 again
        held = new
        seen.append(rows_of(110, held))
    assert seen[0] != [100, 10] and seen[-1] == [100, 10]
    assert rows_of(110, adjusted((0.5, 0.5), (10.0, 1.0), 110, NO_CAPS, inf)) == [100, 10]


def test_shares_stay_where_a_speed_is_not_known() -> None:
    for speeds in ((0.0, 1.0), (inf, 1.0), (float("nan"), 1.0)):
        assert adjusted((0.5, 0.5), speeds, 48, NO_CAPS) == (0.5, 0.5)
    assert adjusted((0.5, 0.5), (2.0, 1.0), 0, NO_CAPS) == (0.5, 0.5)


def test_a_very_slow_rank_can_come_back() -> None:
    """It keeps a row, and a share of one row, so that it grows again within a few looks."""
    held: tuple[float, ...] = (0.5, 0.5)
    for _ in range(12):
        held = adjusted(held, (1000.0, 1.0), 48, NO_CAPS)
    assert rows_of(48, held) == [47, 1] and held[1] > 0.02
    for _ in range(10):
        held = adjusted(held, (1.0, 1.0), 48, NO_CAPS)
    assert rows_of(48, held) == [24, 24]


def test_fixed_costs_are_balanced_too() -> None:
    """Where a step costs something besides its rows, ranks still come to finish together."""
    held = equal(2)
    for _ in range(8):
        counts = rows_of(48, held)
        seconds = [5 + 2 * counts[0], 5 + counts[1]]
        held = adjusted(held, [n / s for n, s in zip(counts, seconds, strict=True)], 48, NO_CAPS)
    assert rows_of(48, held) == [16, 32]


def test_new_shares_hold_from_a_batch_on() -> None:
    division = Division(equal(2), NO_CAPS)
    division.change(3, (0.75, 0.25))
    division.change(5, (0.25, 0.75))
    assert [division.counts(8, number) for number in (0, 2, 3, 4, 5, 99)] == [[4, 4]] * 2 + [[6, 2]] * 2 + [[2, 6]] * 2
    assert division.drawn == 0
    assert division.rows(8, 4, 1) == range(6, 8) and division.drawn == 5
    division.change(4, (0.5, 0.5))  # what was to come is put aside
    assert division.counts(8, 9) == [4, 4] and division.counts(8, 3) == [6, 2]


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(37))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": data_ranks.loader_of(37, 6, shuffle=True),
    "workers": data_ranks.loader_of(37, 6, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Flow(), 6, collate_fn=data_ranks.keep),
    "stream, workers": lambda: DataLoader(Flow(), 6, collate_fn=data_ranks.keep, num_workers=1),
    "a list": lambda: [torch.arange(k, k + 6) for k in range(0, 36, 6)],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_changing_shares_give_every_row_once_in_order(kind: str) -> None:
    division = Division((0.6, 0.3, 0.1), (inf, inf, 2.0))
    division.change(4, (0.1, 0.1, 0.8))
    division.change(9, (0.3, 0.6, 0.1))
    ranks = data_ranks.run(LOADERS[kind], 3, epochs=2, division=division)
    expected = [[list(batch) for batch in epoch] for epoch in data_ranks.plain(LOADERS[kind], epochs=2)]
    assert data_ranks.together(ranks) == expected
    handed = [tuple(rank.shares[number].rows for rank in ranks) for number in (0, -2)]
    last = (2, 2, 2) if kind == "stream, workers" else (2, 3, 1)  # as the first of its epoch
    assert handed == [(3, 2, 1), last]
