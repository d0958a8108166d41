"""Learning rates over optimizer steps: torch's own schedulers, with a warm-up in front and the global batch as unit.

After k optimizer steps, for a group with learning rate lr, a warm-up of w steps and t = (k - w) / (steps - w) <= 1:

    k < w       lr (k + 1) / (w + 1)
    constant    lr
    linear      lr (1 - (1 - floor) t)
    cosine      lr (floor + (1 - floor) (1 + cos(pi t)) / 2)            Loshchilov & Hutter, arXiv:1608.03983
    multistep   lr gamma ^ (milestones that are at most k)
    cyclic      from lr floor up to lr and back in `cycle` steps        Smith, arXiv:1506.01186
    plateau     lr, times `factor` whenever the metric has not improved for `patience` calls

Large batches: scale="linear" multiplies lr by batch / base_batch (Goyal et al., arXiv:1706.02677), "sqrt" by its root.
Nothing depends on the number of ranks: the batch is the global one.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, SequentialLR

from distributedtorch import attach
from distributedtorch.core.errors import UsageError, explain, tell
from distributedtorch.core.world import here
from distributedtorch.decide import Plateau

_MOMENTUM = ("cycle_momentum", "base_momentum", "max_momentum")
_PLATEAU = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("floor",),
    "cosine": ("floor",),
    "multistep": ("milestones", "gamma"),
    "cyclic": ("floor", "cycle", "mode", "gamma", *_MOMENTUM),
    "plateau": _PLATEAU,
}
"""The kinds, and what each takes beside steps, warm-up and scaling; names of the last two are torch's."""


def schedule(
    optimizer: Optimizer,
    kind: str,
    *,
    steps: int | None = None,
    warmup: int = 0,
    batch: float | None = None,
    base_batch: float | None = None,
    scale: str | None = None,
    **options: Any,
) -> LRScheduler:
    """A learning-rate scheduler in optimizer steps: call its `step()` after every `optimizer.step()`.

    It may be made before or after `dt.distribute`; give it to `dt.distribute` too, so that `dt.save` includes it. Make
    it before the optimizer's `load_state_dict`, as every scheduler of torch.

    Args:
        optimizer: Whose groups to drive; each keeps its own learning rate as the top of the curve.
        kind: "constant", "linear", "cosine", "multistep", "cyclic", "plateau"; formulas in the module's docstring.
        steps: All optimizer steps, warm-up included: where "linear" and "cosine" reach their floor.
        warmup: Optimizer steps of linear rise in front. With "plateau", call `step()` after every optimizer step and
            `step(metric)` after every evaluation; metrics that come during the warm-up are not judged.
        batch: The global batch in rows, whatever the number of ranks.
        base_batch: The global batch the learning rates were chosen for.
        scale: "linear" multiplies every group's lr by batch / base_batch, "sqrt" by its root; a printed line says so.
        **options: Of the kind: floor, a fraction of lr (0; "cyclic" 0.1); milestones and gamma (0.1) for "multistep";
            cycle (even) and CyclicLR's mode, gamma and momentums for "cyclic"; ReduceLROnPlateau's for "plateau".

    Returns:
        A plain `torch.optim.lr_scheduler.LRScheduler`.

    Raises:
        UsageError: An argument is missing, unknown or out of range.
    """
    _check_kind(kind, options)
    _check_steps(kind, steps, warmup)
    factor = _factor(batch, base_batch, scale)
    arrange = _MAKE.get(kind, _curve)(kind, steps, warmup, options)  # checked before anything is changed
    if scale is not None:
        _multiply(optimizer, factor, f"{scale}: batch {batch:g} / base batch {base_batch:g}")
    scheduler = arrange(optimizer)
    attach.note_made(scheduler)  # to be attached by a later dt.distribute
    attach.scheduler(scheduler, here())
    return scheduler


@dataclass
class Curve:
    """What a group's learning rate is multiplied by, as a function of optimizer steps taken."""

    kind: str
    steps: int = 0
    warmup: int = 0
    floor: float = 0.0
    milestones: Sequence[int] = ()
    gamma: float = 0.1

    def __call__(self, taken: int) -> float:
        """The factor after `taken` optimizer steps."""
        if taken < self.warmup:
            return (taken + 1) / (self.warmup + 1)
        if self.kind == "multistep":
            return self.gamma ** bisect_right(self.milestones, taken)
        if self.kind == "constant":
            return 1.0
        part = min(1.0, (taken - self.warmup) / (self.steps - self.warmup))
        fall = part if self.kind == "linear" else (1 - math.cos(math.pi * part)) / 2
        return 1 - (1 - self.floor) * fall


# How each kind is made: the arguments are checked, then the result is called with the optimizer.

_Arrange = Callable[[Optimizer], LRScheduler]


def _curve(kind: str, steps: int | None, warmup: int, options: dict[str, Any]) -> _Arrange:
    curve = Curve(kind, steps or 0, warmup, **options)
    if kind == "multistep":
        _check_milestones(curve)
    elif not 0 <= curve.floor <= 1:
        given, needed = f"floor={curve.floor}", "a fraction of the learning rate, 0 to 1"
        raise UsageError(explain(given, needed, "floor=0.1 ends at a tenth of every group's learning rate"))
    return lambda optimizer: LambdaLR(optimizer, curve)


def _cyclic(_: str, steps: int | None, warmup: int, options: dict[str, Any]) -> _Arrange:
    rest = {"cycle_momentum": "base_momentum" in options or "max_momentum" in options, **options}
    floor, cycle = rest.pop("floor", 0.1), rest.pop("cycle", None)
    if not isinstance(cycle, int) or cycle < 2 or cycle % 2:
        given = 'kind "cyclic" without cycle' if cycle is None else f"cycle={cycle!r}"
        raise UsageError(explain(given, "optimizer steps up and down again: even, from 2", "give cycle=2000, say"))
    if not 0 < floor < 1:
        needed = "the bottom of the cycle as a fraction of the learning rate, between 0 and 1"
        raise UsageError(explain(f"floor={floor}", needed, "floor=0.1 cycles between a tenth and the whole"))

    def arrange(optimizer: Optimizer) -> LRScheduler:
        tops = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        lows = [top * floor for top in tops]
        cyclic = CyclicLR(optimizer, lows, tops, step_size_up=cycle // 2, **rest)
        if not warmup:
            return cyclic
        rise = LambdaLR(optimizer, Curve("constant", warmup=warmup))
        rise.base_lrs = list(lows)
        return SequentialLR(optimizer, [rise, cyclic], [warmup])

    return arrange


def _plateau(_: str, steps: int | None, warmup: int, options: dict[str, Any]) -> _Arrange:
    return lambda optimizer: Plateau(optimizer, warmup, **options)


_MAKE: dict[str, Callable[[str, int | None, int, dict[str, Any]], _Arrange]] = {"cyclic": _cyclic, "plateau": _plateau}


# The global batch.


def _factor(batch: float | None, base_batch: float | None, scale: str | None) -> float:
    if scale is None and batch is None and base_batch is None:
        return 1.0
    if scale not in ("linear", "sqrt"):
        given = "batch= without scale=" if scale is None else f"scale={scale!r}"
        do = "scale='linear' for lr x batch / base_batch, 'sqrt' for its root, or leave all three out"
        raise UsageError(explain(given, "scale to say how the learning rate follows the batch", do))
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if value is None or not 0 < value < math.inf:
            given = f"scale={scale!r} " + (f"without {name}" if value is None else f"with {name}={value}")
            what = "the global batch of this run" if name == "batch" else "the global batch the lr was chosen for"
            raise UsageError(explain(given, f"{name}: {what}, in rows, more than 0", f"give {name}=256, say"))
    assert batch is not None and base_batch is not None
    ratio = batch / base_batch
    return ratio if scale == "linear" else math.sqrt(ratio)


def _multiply(optimizer: Optimizer, factor: float, why: str) -> None:
    groups = optimizer.param_groups
    if any("initial_lr" in group for group in groups):
        given = "scale= for an optimizer that has a scheduler or a loaded state already"
        do = "call dt.schedule before other schedulers and before optimizer.load_state_dict"
        raise UsageError(explain(given, "learning rates as they were chosen, to multiply them once", do))
    before = [float(group["lr"]) for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    if here().rank == 0:
        pairs = dict.fromkeys(f"{old:g} -> {float(group['lr']):g}" for old, group in zip(before, groups, strict=True))
        tell(f"distributedtorch: lr {', '.join(pairs)} ({why})")


# What is refused.


def _check_kind(kind: str, options: dict[str, Any]) -> None:
    if kind not in OPTIONS:
        raise UsageError(explain(f"schedule kind {kind!r}", f"one of {', '.join(OPTIONS)}", _nearest(kind, OPTIONS)))
    for name in options:
        if name not in OPTIONS[kind]:
            takes = ", ".join(("steps", "warmup", "batch", "base_batch", "scale", *OPTIONS[kind]))
            given = f"{name}= for a schedule of kind {kind!r}"
            raise UsageError(explain(given, f"{kind} takes {takes}", _nearest(name, OPTIONS[kind])))


def _nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "use one of them"


def _check_steps(kind: str, steps: int | None, warmup: int) -> None:
    if kind in ("linear", "cosine") and steps is None:
        needed = "steps: all optimizer steps of the run, where the curve ends"
        do = "steps=epochs * len(loader) (divided by `accumulate`, where the plan has it)"
        raise UsageError(explain(f"a {kind} schedule without steps", needed, do))
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            needed = f"a whole number of optimizer steps, from {least}"
            raise UsageError(explain(f"{name}={value!r}", needed, f"give {name}={max(100, least)}, say"))
    if steps is not None and warmup >= steps:
        given = f"warmup={warmup} of steps={steps}"
        raise UsageError(explain(given, "fewer warm-up steps than steps", f"warmup={steps // 10}, or more steps"))


def _check_milestones(curve: Curve) -> None:
    marks = list(curve.milestones)
    rising = all(low < high for low, high in pairwise(marks))
    if not marks or not rising or marks[0] <= curve.warmup:
        given = f"milestones={marks} after a warm-up of {curve.warmup} steps"
        needed = "at least one optimizer step, each larger than the one before, all after the warm-up"
        raise UsageError(
            explain(given, needed, f"milestones={sorted({m for m in marks if m > curve.warmup}) or [1000]}")
        )
