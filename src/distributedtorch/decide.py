"""Decisions that all ranks take together: a number of one rank becomes the same number everywhere, then it is judged.

What travels: 8 bytes from every rank to every other, per decision. A decision is a group call: all ranks come to it.
"""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.launch.start import join_world


def any(flag: bool | Tensor) -> bool:
    """Whether `flag` holds on some rank: the same answer on all of them. A group call."""
    return max(_votes("any", flag)) > 0


def all(flag: bool | Tensor) -> bool:
    """Whether `flag` holds on every rank: the same answer on all of them. A group call."""
    return min(_votes("all", flag)) > 0


def agreed(value: SupportsFloat, name: str) -> float:
    """The mean over ranks of what each passed, bit-identical on all of them; where all passed one number, that number.

    Args:
        value: This rank's number: a float, an int, a tensor of one element.
        name: What it is for, in messages.
    """
    values = _of_all(name, number(value, name))
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def number(value: Any, name: str) -> float:
    """`value` as a float, or an error that says what came instead."""
    value = value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, SupportsFloat) and (not isinstance(value, Tensor) or value.numel() == 1):
        return float(value)
    said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
    needed = "one number: a float, an int or a tensor of one element"
    raise UsageError(
        explain(f"{name} was given {said}", needed, "pass the loss or the metric itself (x.mean() of many)")
    )


class EarlyStop:
    """Stop when a value has not improved for a while: one decision for all ranks.

    `if stop(value): break` judges the mean over ranks of what each passed. Ranks with unequal rows weigh equally in it:
    pass `dt.mean(loss)` for the mean over the global batch, which is what one process passes.

    Args:
        patience: After how many values in a row without improvement to stop, from 1.
        min_delta: By how much a value must be better than the best so far to count as one.
        mode: "min" where smaller is better, "max" where larger is.
    """

    def __init__(self, patience: int = 5, min_delta: float = 0.0, mode: str = "min") -> None:
        _check(patience, min_delta, mode)
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """Values in a row that were no improvement."""

    def __call__(self, value: SupportsFloat) -> bool:
        """Take the next value; whether to stop, the same on all ranks. A group call.

        Raises:
            UsageError: It is not a number, or NaN (on all ranks, where one passed NaN).
        """
        present = agreed(value, "EarlyStop")
        if math.isnan(present):
            raise UsageError(_NAN)
        if self._better(present):
            self.best, self.waited = present, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _better(self, value: float) -> bool:
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, as plain data; the same on all ranks."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was seen."""
        self.best, self.waited = state["best"], state["waited"]


class Plateau(ReduceLROnPlateau):
    """Torch's, judging the mean over ranks of the metrics, with a warm-up in front. Its `step` is a group call."""

    def __init__(self, optimizer: Optimizer, warmup: int = 0, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.warmup, self.warmed = warmup, 0
        self.tops = [group["lr"] for group in optimizer.param_groups]
        if warmup:
            self._rise()

    def step(self, metrics: SupportsFloat | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """After an evaluation: judge the metric. Without one: an optimizer step of the warm-up was taken."""
        if metrics is None and self.warmup == 0:
            raise UsageError(NO_METRIC)
        if metrics is not None and self.warmed == 0 < self.warmup:
            raise UsageError(_NEVER_WARM)
        if self.warmed == self.warmup and metrics is not None:
            super().step(agreed(metrics, "plateau"), epoch)
        elif self.warmed < self.warmup and metrics is None:
            self.warmed += 1
            self._rise()

    def _rise(self) -> None:
        for group, top in zip(self.optimizer.param_groups, self.tops, strict=True):
            group["lr"] = top * ((self.warmed + 1) / (self.warmup + 1))
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


NO_METRIC = explain(
    "step() of a plateau scheduler without a metric",
    "the number that is to improve: it decides about the learning rate",
    "scheduler.step(loss) after every evaluation, on all ranks",
)
_NEVER_WARM = explain(
    "step(metric) of a plateau scheduler with a warm-up whose step() was never called",
    "the warm-up counts optimizer steps, and none was told",
    "call scheduler.step() after every optimizer.step(), and scheduler.step(metric) after every evaluation",
)


def _check(patience: int, min_delta: float, mode: str) -> None:
    if patience < 1:
        given = f"EarlyStop(patience={patience})"
        raise UsageError(explain(given, "patience from 1", "give the values without improvement after which to stop"))
    if not min_delta >= 0:
        given = f"EarlyStop(min_delta={min_delta})"
        raise UsageError(explain(given, "0 or more", "give the smallest improvement that counts"))
    if mode not in ("min", "max"):
        needed = '"min" (smaller is better) or "max" (larger is)'
        raise UsageError(explain(f"EarlyStop(mode={mode!r})", needed, "use one of the two"))


_NAN = explain(
    "EarlyStop was given NaN, by one rank or several",
    "a number that can be compared: training that has diverged is not training that has stopped improving",
    "if the run may end so, test for it first: `if dt.any(math.isnan(value)): break`; else lower the learning rate or "
    "clip (plan='clip=1.0')",
)


def _votes(name: str, flag: Any) -> list[float]:
    if isinstance(flag, Tensor) and flag.numel() == 1:
        flag = bool(flag.item())
    if isinstance(flag, (bool, int)) or type(flag).__name__ in ("bool", "bool_"):  # numpy's has no common class
        return _of_all(name, float(bool(flag)))
    given = f"dt.{name} was given a {type(flag).__name__}"
    raise UsageError(
        explain(given, "one bool", f"dt.{name} asks the ranks; for many values use Python's {name}() first")
    )


def _of_all(name: str, value: float) -> list[float]:
    """Every rank's number, in rank order."""
    comm = join_world().comm
    if comm.world == 1:
        return [value]
    return comm.exchange(f"decision {name}", torch.tensor(value, dtype=torch.float64)).tolist()
