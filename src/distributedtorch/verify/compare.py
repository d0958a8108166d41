"""Comparing three runs of one script: the truth, the same with rows reversed (the noise), and the plan.

What counts as the same. Two correct runs differ by rounding only, and rounding has three sources, each with a measure:
- the order in which rows are summed: measured, as the difference between the truth and the reversed run. One reversal
  is one draw, and a tensor of few elements can come out equal by luck; so a tensor may differ by 4 times its own noise
  and by 4 times what 9 of 10 tensors stay below, relative to how far they moved;
- storing a parameter after every step: one unit in the last place, times the root of the steps;
- kernels that work differently on fewer rows, which no reversal shows: a floor relative to how far the tensor moved
  since the start, 1e-5 in float32 and 1e-9 in float64 (a few units in the last place, times a condition of 100).
The measure is the way moved, not the size of the parameter: in fine-tuning the weights move by 1e-5 of themselves, and
a gradient that is wrong by a tenth would hide below any bound on the weights. A wrong weighting, a local clip or a lost
sample changes the way by 1e-3 or more in a batch of ordinary size; so false alarms and missed faults are both far off.

A parameter whose gradient is zero in exact arithmetic (a bias before BatchNorm, the key bias of attention) moves by
rounding alone, and Adam makes whole steps of it. Such tensors are known by their gradient: smaller than rounding can
resolve beside the others, or small and different in the two one-process runs. They, and what follows them in the two
one-process runs (the running mean of that BatchNorm), are named and not judged. Losses may differ by 4 times the
largest noise so far and by the same floor; learning rates must be equal. Every step is judged, so that the first one to
differ is named: by sketches (`sketch.py`), the last one by the full tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distributedtorch.verify.runs import Run, Sketches
from distributedtorch.verify.sketch import distance, norm, plain

_TIMES_NOISE = 4.0
_QUANTILE = 0.9
_UNRESOLVED = 32.0
"""A gradient below so many units in the last place of the largest is rounding alone."""
_SMALL, _NOISY = 1e-3, 0.05
"""So is one below this share of the largest that differs by that much between two one-process runs."""
_FOLLOWS = 100.0
"""Noise above so many floors comes from such parameters, where there are any."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How much one quantity differs, all relative to its size in the truth."""

    name: str
    difference: float
    noise: float
    allowed: float
    trained: bool = True
    """A parameter, a gradient or a loss; else a buffer."""
    judged: bool = True
    """False where it moves by rounding alone."""

    @property
    def beyond(self) -> bool:
        """Whether it differs by more than rounding explains; so does anything that is not a number."""
        return self.judged and not self.difference <= self.allowed

    @property
    def excess(self) -> float:
        """The difference in units of what is allowed, to order by."""
        excess = self.difference / self.allowed if self.allowed else math.inf if self.difference else 0.0
        return math.inf if math.isnan(excess) else excess


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The three."""

    truth: Run
    noise: Run
    plan: Run
    precision: str | None = None
    """The word of the plan that says what to compute in, where it is not the parameters' own type."""

    @property
    def steps(self) -> int:
        """Steps that all three have taken."""
        return min(len(self.truth.steps), len(self.noise.steps), len(self.plan.steps))

    @property
    def floor(self) -> float:
        """What kernels may differ by on fewer rows, relative to what they compute."""
        types = {kind.dtype for kind in self.truth.kinds.values() if kind.trained} | {self.precision}
        if "fp8" in types:
            return 6e-2
        if types & {"bfloat16", "bf16", "float16", "fp16"}:
            return 4e-3
        return 1e-9 if types <= {"float64", "complex128", None} else 1e-5


def states(runs: Runs, step: int) -> list[Row]:
    """Every parameter and buffer after a step (from 1), the most suspect first; the last step by the full tensors."""
    truth, noise, plan = (run.steps[step - 1].state for run in (runs.truth, runs.noise, runs.plan))
    moved = {name: distance(truth[name], runs.truth.initial[name]) for name in truth if name in runs.truth.initial}
    full = step == runs.steps and len(runs.truth.steps) == len(runs.plan.steps) == len(runs.noise.steps)
    deltas = _full(runs.truth, runs.plan) if full else {}
    noises = _full(runs.truth, runs.noise) if full else {}
    deltas = {**_apart(truth, plan), **deltas}
    noises = {**_apart(truth, noise), **noises}
    names = [name for name in truth if name in moved and name in deltas and name in noises]
    by_rounding = _by_rounding(runs, step)
    if by_rounding:
        by_rounding |= {name for name in names if noises[name] > _FOLLOWS * runs.floor * moved[name]}
    judged = [name for name in names if name not in by_rounding]
    pooled = _pooled([noises[name] / moved[name] for name in judged if moved[name] > 0])
    rows = []
    for name in names:
        kind, size = runs.truth.kinds[name], norm(truth[name])
        allowed = _last_place(kind.dtype) * math.sqrt(step) * size
        if _is_real(kind.dtype):
            allowed += _TIMES_NOISE * (noises[name] + pooled * moved[name]) + runs.floor * moved[name]
        scale = size or moved[name] or 1.0
        rows.append(
            Row(
                name=name,
                difference=deltas[name] / scale,
                noise=noises[name] / scale,
                allowed=allowed / scale,
                trained=kind.trained,
                judged=name in judged,
            )
        )
    return sorted(rows, key=lambda row: (row.judged, row.excess), reverse=True)


def gradients(runs: Runs, step: int, which: str) -> list[Row]:
    """Every gradient of a step, as backward left it (`gradient`) or as the optimizer used it (`used`)."""
    truth, noise, plan = (getattr(run.steps[step - 1], which) for run in (runs.truth, runs.noise, runs.plan))
    by_rounding = _by_rounding(runs, step)
    noises, deltas = _apart(truth, noise), _apart(truth, plan)
    judged = {name for name in truth if norm(truth[name]) > 0 and name not in by_rounding}
    pooled = _pooled([noises[name] / norm(truth[name]) for name in judged if name in noises])
    rows = []
    for name in truth:
        size = norm(truth[name]) or 1.0
        own = noises.get(name, 0.0) / size
        allowed = _TIMES_NOISE * (own + pooled) + runs.floor
        delta = deltas.get(name, math.inf) / size
        rows.append(Row(name=name, difference=delta, noise=own, allowed=allowed, judged=name in judged))
    return sorted(rows, key=lambda row: row.excess, reverse=True)


def losses(runs: Runs) -> list[list[Row]]:
    """Every loss of every step."""
    found, largest, scale = [], 0.0, 0.0
    for number in range(runs.steps):
        truth, noise, plan = (run.steps[number].losses for run in (runs.truth, runs.noise, runs.plan))
        rows = []
        for one, other, mine in zip(truth, noise, plan, strict=False):
            largest, scale = max(largest, abs(one - other)), max(scale, abs(one))
            size = scale or 1.0
            allowed = (_TIMES_NOISE * largest) / size + runs.floor
            rows.append(
                Row(name="loss", difference=abs(one - mine) / size, noise=abs(one - other) / size, allowed=allowed)
            )
        found.append(rows)
    return found


def _full(one: Run, other: Run) -> dict[str, float]:
    """The 2-norm of the difference of every tensor at the end."""
    both = [name for name in one.final if name in other.final]
    return {name: _distance(one.final[name], other.final[name]) for name in both}


def _distance(one: Tensor, other: Tensor) -> float:
    return float((plain(one).double() - plain(other).double()).norm()) if one.shape == other.shape else math.inf


def _apart(one: Sketches, other: Sketches) -> dict[str, float]:
    return {name: distance(one[name], other[name]) for name in one if name in other}


def _pooled(relative: list[float]) -> float:
    """What 9 of 10 tensors stay below."""
    finite = sorted(value for value in relative if math.isfinite(value))
    return finite[int(_QUANTILE * (len(finite) - 1))] if finite else 0.0


def _by_rounding(runs: Runs, step: int) -> set[str]:
    """Parameters whose gradients have been rounding alone up to a step."""
    alone: set[str] = set()
    moved: set[str] = set()
    for number in range(step):
        found = set(_rounding_now(runs, number))
        alone |= found
        moved |= {name for name, one in runs.truth.steps[number].gradient.items() if norm(one) > 0} - found
    return alone - moved


def _rounding_now(runs: Runs, number: int) -> Iterator[str]:
    truth, noise = runs.truth.steps[number].gradient, runs.noise.steps[number].gradient
    typical = {name: norm(one) / math.sqrt(max(runs.truth.kinds[name].numel, 1)) for name, one in truth.items()}
    largest = max(typical.values(), default=0.0)
    for name, size in typical.items():
        apart = distance(truth[name], noise[name]) if name in noise else 0.0
        unresolved = size <= _UNRESOLVED * _last_place(runs.truth.kinds[name].dtype) * largest
        noisy = size <= _SMALL * largest and apart > _NOISY * norm(truth[name])
        if size > 0 and (unresolved or noisy):
            yield name


def _last_place(dtype: str) -> float:
    """One unit in the last place of 1; whole numbers are compared to the precision of the sketch."""
    return torch.finfo(getattr(torch, dtype)).eps if _is_real(dtype) else 1e-12


def _is_real(dtype: str) -> bool:
    kind = getattr(torch, dtype)
    return bool(kind.is_floating_point or kind.is_complex)
