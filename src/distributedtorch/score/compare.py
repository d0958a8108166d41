"""A against B: is the difference of two lists of scores more than chance?

Permutation tests (Fisher 1935; Pitman 1937): paired scores may swap within each pair, unpaired ones between the lists;
all ways are tried where they are few, else a random sample of them (Phipson & Smyth 2010 for the +1). The interval is
the percentile bootstrap (Efron 1979), widened by Student's t over the normal quantile and by sqrt(n / (n - 1)), without
which few scores give too narrow an interval. Everything is drawn from a generator of its own on the host: the same
scores and seed give the same answer on every rank, and nothing travels. Work: resamples x scores, so that beyond 2,000
scores fewer resamples are drawn, down to 1,000. Not for many comparisons at once: no correction is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from distributedtorch.core.errors import UsageError, explain

_LEVEL = 0.05
_NORMAL = 1.959963984540054
"""The normal distribution's 97.5% quantile."""
_RESAMPLES, _FEWEST, _WORK = 10_000, 1_000, 20_000_000
_CHUNK = 2_000_000
"""Numbers held at once."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two lists of scores say about each other."""

    difference: float
    """Mean of b minus mean of a."""
    low: float
    """Lower end of the 95% interval of the difference."""
    high: float
    """Upper end of it."""
    p: float
    """How often chance alone gives a difference at least as large, in either direction."""
    paired: bool
    """Whether scores were compared pair by pair."""
    num_a: int
    num_b: int
    verdict: str
    """All of it in one sentence."""

    @property
    def significant(self) -> bool:
        """Whether p is below 0.05."""
        return self.p < _LEVEL

    def __str__(self) -> str:
        return self.verdict


def compare(
    a: Tensor | Sequence[float], b: Tensor | Sequence[float], *, paired: bool = True, seed: int = 0
) -> Comparison:
    """Compare two runs by their scores: the difference b - a, its 95% interval, a p-value and a verdict.

        before, after = dt.scores(old, test, right), dt.scores(new, test, right)     # one score per sample: pairs
        dt.print(dt.compare(before, after))
        dt.print(dt.compare(accuracies_of_seeds_a, accuracies_of_seeds_b, paired=False))

    Each rank computes for itself: give all the same scores (`dt.scores`, `dt.evaluate`) and they agree.

    Args:
        a: The scores of the first run, one per sample or per seed.
        b: The scores of the second run.
        paired: Whether `a[i]` and `b[i]` belong together: the same sample, or the same seed.
        seed: What the resampling is drawn from.

    Raises:
        UsageError: Fewer than two scores, scores that are not finite, or pairs of unequal number.
    """
    first, second = _scores("a", a), _scores("b", b)
    if paired and len(first) != len(second):
        given = f"{len(first)} scores of a and {len(second)} of b as pairs"
        raise UsageError(explain(given, "one score of each for every sample", "pass paired=False, or the same samples"))
    generator = torch.Generator().manual_seed(seed)
    test: _Test = _Paired(first, second) if paired else _Unpaired(first, second)
    p = _p_value(test, generator)
    low, high = _interval(test, generator)
    sizes = len(first), len(second)
    told = _verdict(test, p, f"{low:.4g} to {high:.4g}")
    return Comparison(
        difference=test.difference, low=low, high=high, p=p, paired=paired, num_a=sizes[0], num_b=sizes[1], verdict=told
    )


class _Test(ABC):
    """One way of comparing: what swapping and what drawing again means."""

    difference: float
    num: int
    """Scores drawn per resample."""
    fewest: int
    """Scores of the smaller list."""
    ways: int
    """Different swaps."""
    least_p: float
    """The smallest p that so many scores can give."""
    scale: float
    """The largest score."""
    counted: str
    """The scores, in words."""

    @abstractmethod
    def all_swapped(self) -> Tensor:
        """The difference under every swap."""

    @abstractmethod
    def swapped(self, count: int, generator: torch.Generator) -> Tensor:
        """The difference under `count` random swaps."""

    @abstractmethod
    def redrawn(self, count: int, generator: torch.Generator) -> Tensor:
        """The difference in `count` bootstrap samples."""

    @property
    def resamples(self) -> int:
        """How many draws the work allows."""
        return min(_RESAMPLES, max(_FEWEST, _WORK // self.num))


class _Paired(_Test):
    """Within each pair, which score is a's and which is b's may swap: the sign of each difference."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.pairs = b - a
        self.difference = float(self.pairs.mean())
        self.num = self.fewest = len(a)
        self.ways = 2 ** len(a)
        self.least_p = 2 / self.ways
        self.scale = float(torch.maximum(a.abs(), b.abs()).amax())
        self.counted = f"{len(a)} pairs"

    def all_swapped(self) -> Tensor:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=self.num)), dtype=torch.float64)
        return signs @ self.pairs / self.num

    def swapped(self, count: int, generator: torch.Generator) -> Tensor:
        signs = torch.randint(0, 2, (count, self.num), generator=generator, dtype=torch.int8)
        return (signs.double() * 2 - 1) @ self.pairs / self.num

    def redrawn(self, count: int, generator: torch.Generator) -> Tensor:
        return _redrawn(self.pairs, count, generator)


class _Unpaired(_Test):
    """Which of all scores are a's may change."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b, self.pool = a, b, torch.cat([a, b])
        self.difference = float(b.mean() - a.mean())
        self.num, self.fewest = len(self.pool), min(len(a), len(b))
        self.ways = math.comb(self.num, len(a))
        self.least_p = (2 if len(a) == len(b) else 1) / self.ways
        self.scale = float(self.pool.abs().amax())
        self.counted = f"{len(a)} and {len(b)} scores"

    def _taking(self, chosen: Tensor) -> Tensor:
        """The difference where a has the scores numbered in each row of `chosen`."""
        ours = self.pool[chosen].sum(dim=1)
        return (self.pool.sum() - ours) / len(self.b) - ours / len(self.a)

    def all_swapped(self) -> Tensor:
        return self._taking(torch.tensor(list(combinations(range(self.num), len(self.a)))))

    def swapped(self, count: int, generator: torch.Generator) -> Tensor:
        order = torch.rand(count, self.num, generator=generator, dtype=torch.float64).argsort(dim=1)
        return self._taking(order[:, : len(self.a)])

    def redrawn(self, count: int, generator: torch.Generator) -> Tensor:
        return _redrawn(self.b, count, generator) - _redrawn(self.a, count, generator)


def _p_value(test: _Test, generator: torch.Generator) -> float:
    bound = abs(test.difference) - 1e-12 * test.scale  # what is equal but for rounding counts as equal
    if test.ways <= test.resamples:
        return float((test.all_swapped().abs() >= bound).double().mean())
    extreme = int((_in_chunks(test, test.swapped, generator).abs() >= bound).sum())
    return (extreme + 1) / (test.resamples + 1)


def _interval(test: _Test, generator: torch.Generator) -> tuple[float, float]:
    drawn = _in_chunks(test, test.redrawn, generator)
    low, high = torch.quantile(drawn, torch.tensor([_LEVEL / 2, 1 - _LEVEL / 2], dtype=torch.float64)).tolist()
    wider = _student(test.fewest - 1) / _NORMAL * math.sqrt(test.fewest / (test.fewest - 1))
    return test.difference - wider * (test.difference - low), test.difference + wider * (high - test.difference)


def _in_chunks(test: _Test, draw: Callable[[int, torch.Generator], Tensor], generator: torch.Generator) -> Tensor:
    left, each = test.resamples, max(1, _CHUNK // test.num)
    parts = []
    while left > 0:
        parts.append(draw(min(each, left), generator))
        left -= each
    return torch.cat(parts)


def _redrawn(scores: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return scores[torch.randint(0, len(scores), (count, len(scores)), generator=generator)].mean(dim=1)


def _student(freedom: int) -> float:
    """Student's 97.5% quantile: exact for one and two degrees of freedom, Cornish and Fisher's series beyond."""
    if freedom <= 2:
        return (12.706204736, 4.302652730)[freedom - 1]
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def _scores(name: str, given: Tensor | Sequence[float]) -> Tensor:
    scores = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    if scores.ndim != 1 or len(scores) < 2 or not bool(scores.isfinite().all()):
        seen = f"scores {name} of shape {tuple(scores.shape)}"
        seen += "" if bool(scores.isfinite().all()) else " that are not all finite"
        raise UsageError(
            explain(seen, "one dimension, two or more finite numbers", "pass one score per sample or seed")
        )
    return scores


def _verdict(test: _Test, p: float, interval: str) -> str:
    figures = f"b - a = {test.difference:.4g}, 95% interval {interval}, p = {p:.2g}, {test.counted}"
    if test.least_p >= _LEVEL:
        return f"Too few scores to tell a from b, since p cannot come below {test.least_p:.2g} ({figures})."
    if p < _LEVEL:
        return f"b scores {'higher' if test.difference > 0 else 'lower'} than a, more than chance explains ({figures})."
    return f"No difference between a and b beyond chance was found ({figures})."
