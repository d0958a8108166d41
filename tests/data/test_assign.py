"""Pieces of work are all given, each once, as the policy says."""

from __future__ import annotations

import random
from itertools import product

import pytest

import distributedtorch as dt
from distributedtorch.data.assign import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_every_piece_once(policy: str) -> None:
    draw = random.Random(5)
    for _ in range(50):
        costs = [draw.choice([0.0, 1.0, draw.random() * 9]) for _ in range(draw.randint(0, 20))]
        taken = dt.assign(costs, draw.randint(1, 6), policy)
        assert sorted(piece for pieces in taken for piece in pieces) == list(range(len(costs)))


def test_round_robin_looks_at_nothing() -> None:
    assert dt.assign([9, 1, 1, 1, 1], 2, "round-robin", loads=[100, 0]) == [[0, 2, 4], [1, 3]]


def test_least_load_counts_work_and_most_idle_counts_time() -> None:
    costs, loads, speeds = [4, 4, 4, 4], [0, 2], [1, 4]
    assert dt.assign(costs, 2, "least-load", loads=loads, speeds=speeds) == [[0, 2], [1, 3]]
    assert dt.assign(costs, 2, "most-idle", loads=loads, speeds=speeds) == [[0], [1, 2, 3]]


def test_the_urgent_and_then_the_large_come_first() -> None:
    taken = dt.assign([1, 5, 3, 2], 2, "priority", priorities=[9, 0, 0, 0])
    assert taken == [[0, 2, 3], [1]]


def test_largest_first_is_never_far_from_the_best() -> None:
    """Graham's bound: within 4/3 of the best there is."""
    draw = random.Random(2)
    for _ in range(20):
        costs = [draw.randint(1, 9) for _ in range(7)]
        taken = dt.assign(costs, 3, "priority")
        longest = max(sum(costs[piece] for piece in pieces) for pieces in taken)
        sums = [
            [sum(c for c, r in zip(costs, to, strict=True) if r == k) for k in range(3)]
            for to in product(range(3), repeat=7)
        ]
        assert longest <= 4 / 3 * min(map(max, sums))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "fair"}, "one of round-robin, least-load, most-idle, priority"),
        ({"ranks": 0}, "over 0 ranks"),
        ({"speeds": [1.0]}, "with 1 speeds"),
        ({"speeds": [1.0, 0.0]}, "above 0"),
        ({"costs": [1.0, -1.0]}, "0 or more"),
        ({"priorities": [1.0]}, "with 1 priorities"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(dt.UsageError, match=said):
        dt.assign(**{"costs": [1.0, 2.0], "ranks": 2, **given})  # type: ignore[arg-type]
