"""Comparing two runs: p-values by hand, intervals that hold what they say, the same answer everywhere."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

import distributedtorch as dt
from distributedtorch.score import compare


def scores(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


@pytest.mark.timeout(20)
def test_paired_p_is_the_share_of_sign_flips() -> None:
    a, b = [0.70, 0.71, 0.69, 0.72, 0.70, 0.74], [0.73, 0.74, 0.70, 0.71, 0.75, 0.78]
    pairs = [y - x for x, y in zip(a, b, strict=True)]
    flips = [abs(sum(s * d for s, d in zip(signs, pairs, strict=True))) for signs in product((1, -1), repeat=6)]
    result = dt.compare(a, b)
    assert result.p == sum(flip >= abs(sum(pairs)) - 1e-9 for flip in flips) / 64
    assert result.difference == pytest.approx(sum(pairs) / 6)


@pytest.mark.timeout(20)
def test_unpaired_p_is_the_share_of_divisions() -> None:
    a, b = [1.0, 2.0, 3.0, 2.5], [4.0, 5.0, 2.8]
    pool = a + b
    gaps = [
        abs((sum(pool) - sum(pool[i] for i in mine)) / 3 - sum(pool[i] for i in mine) / 4)
        for mine in combinations(range(7), 4)
    ]
    result = dt.compare(a, b, paired=False)
    assert result.p == pytest.approx(sum(gap >= abs(sum(b) / 3 - sum(a) / 4) - 1e-9 for gap in gaps) / 35)
    assert (result.num_a, result.num_b, result.paired) == (4, 3, False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("paired", [True, False])
def test_drawn_p_is_near_the_counted_one(paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = scores(8, 1), scores(8, 2, 0.7)
    counted = dt.compare(a, b, paired=paired)
    monkeypatch.setattr(compare._Test, "resamples", 4000)
    test = compare._Paired if paired else compare._Unpaired
    monkeypatch.setattr(test, "all_swapped", lambda self: self.swapped(4000, torch.Generator().manual_seed(0)))
    drawn = dt.compare(a, b, paired=paired)
    assert drawn.p == pytest.approx(counted.p, abs=0.03) and drawn.p != counted.p


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("b", "paired", "words"),
    [
        (scores(60, 1) + 0.4, True, "b scores higher than a, more than chance"),
        (scores(60, 1) - 0.4, True, "b scores lower than a, more than chance"),
        (scores(60, 2), True, "No difference between a and b beyond chance"),
        (scores(60, 2, 2.0), False, "b scores higher than a"),
        (scores(60, 1), True, "No difference"),
    ],
)
def test_verdicts(b: torch.Tensor, paired: bool, words: str) -> None:
    result = dt.compare(scores(60, 1), b, paired=paired)
    assert words in result.verdict and str(result) == result.verdict
    assert result.significant == (result.p < 0.05) == ("more than chance" in words or "higher" in words)
    assert result.low <= result.difference <= result.high


@pytest.mark.timeout(20)
def test_too_few_scores_are_said_to_be_too_few() -> None:
    result = dt.compare([1.0, 1.1, 1.2, 1.0, 1.1], [9.0, 9.1, 9.3, 9.0, 9.2])
    assert result.p == 2 / 32 and not result.significant and result.verdict.startswith("Too few scores")
    assert dt.compare([1.0] * 6, [9.0] * 6).significant, "six pairs are the fewest that can tell"


@pytest.mark.timeout(20)
def test_the_answer_is_the_seeds_alone() -> None:
    a, b = scores(50, 1), scores(50, 2, 0.3)
    first = dt.compare(a, b, seed=3)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert dt.compare(a.tolist(), b.tolist(), seed=3) == first
    assert torch.equal(before, torch.random.get_rng_state())
    assert dt.compare(a, b, seed=4).low != first.low


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("count", "paired"), [(3, True), (12, True), (5, False)])
def test_intervals_and_alarms_are_honest(count: int, paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No difference: 95% of intervals hold zero and 5% of p are below 0.05, within what 200 trials can tell."""
    monkeypatch.setattr(compare, "_RESAMPLES", 500)
    results = [dt.compare(scores(count, 2 * n), scores(count, 2 * n + 1), paired=paired) for n in range(200)]
    assert sum(r.low <= 0 <= r.high for r in results) / 200 > 0.91
    assert sum(r.significant for r in results) / 200 < 0.09


@pytest.mark.timeout(20)
def test_intervals_without_widening_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_RESAMPLES", 500)
    monkeypatch.setattr(compare, "_student", lambda freedom: compare._NORMAL)
    results = [dt.compare(scores(5, 2 * n), scores(5, 2 * n + 1)) for n in range(200)]
    assert sum(r.low <= 0 <= r.high for r in results) / 200 < 0.91
