"""Why two runs differ: the first step at which they do, and the first thing that does in the order of cause.

A step is: batch -> loss -> gradient -> clipped gradient -> update with a learning rate -> parameters. What is still
equal clears everything before it, so the first link that differs names the few things that can be at fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from distributedtorch.verify.compare import Row, Runs, gradients, losses, states
from distributedtorch.verify.runs import Run, Step
from distributedtorch.verify.sketch import distance, norm

_UNREPEATED = 100.0
"""One process differs from itself where its losses do by so many times the floor before any update."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first difference that rounding does not explain."""

    step: int
    """From 1; 0: before the first."""
    what: str
    """`parameter fc.weight`, `loss`, `learning rate`, ..."""
    evidence: tuple[str, ...]
    """What was found, in the order of cause."""
    reasons: tuple[str, ...]
    """What is likely behind it, the likeliest first."""


def find(runs: Runs) -> Fault | None:
    """The first difference, if there is one."""
    return _unrepeated(runs) or _first(runs) or _steps(runs)


# The script itself does not repeat.


def _unrepeated(runs: Runs) -> Fault | None:
    truth, noise = runs.truth, runs.noise
    again = "the same script, run twice in one process, does not give the same"
    moved = _initial(truth, noise)
    if moved:
        evidence = f"{again} initial {moved}"
        return Fault(step=0, what=f"parameter {moved}", evidence=(evidence,), reasons=(_SEED_WEIGHTS,))
    for number, (one, two) in enumerate(zip(truth.steps, noise.steps, strict=False), start=1):
        if one.rows != two.rows:
            evidence = f"{again} batches: {_rows(one, two)}"
            return Fault(step=number, what="batch", evidence=(evidence,), reasons=(_SEED_ORDER, _AUGMENTATION))
    first = [row for row in (losses(runs) or [[]])[0] if row.noise > _UNREPEATED * runs.floor]
    if first:
        evidence = f"{again} first loss on the same rows: {first[0].noise:.1e} apart"
        return Fault(step=1, what="loss", evidence=(evidence,), reasons=(_RANDOM, _ROW_ORDER))
    return None


def _initial(one: Run, other: Run) -> str:
    """The first tensor that differs before the first step."""
    apart = (name for name, old in one.initial.items() if name in other.initial and _apart(old, other.initial[name]))
    return next(apart, "")


def _apart(one: list[float], other: list[float]) -> bool:
    return distance(one, other) > 1e-10 * max(norm(one), norm(other))


# The plan differs.


def _first(runs: Runs) -> Fault | None:
    moved = _initial(runs.truth, runs.plan)
    if moved:
        evidence = f"{moved} differs before the first step"
        return Fault(step=0, what=f"parameter {moved}", evidence=(evidence,), reasons=(_WEIGHTS_BY_RANK,))
    found = losses(runs)
    for step in range(1, runs.steps + 1):
        loss = next((row for row in found[step - 1] if row.beyond), None)
        beyond = [row for row in states(runs, step) if row.beyond]
        truth, plan = runs.truth.steps[step - 1], runs.plan.steps[step - 1]
        if loss is None and not beyond and truth.lr == plan.lr:
            continue
        params = [row for row in beyond if row.trained]
        what = "loss" if loss else "learning rate"
        if beyond:
            what = f"parameter {params[0].name}" if params else f"buffer {beyond[0].name}"
        links = list(_links(runs, step, loss, beyond))
        said = [text for text, _ in links] + _drifted(plan)
        reasons = tuple(dict.fromkeys(reason for _, several in links for reason in several))
        return Fault(step=step, what=what, evidence=tuple(said), reasons=reasons or _UPDATE)
    return None


def _links(runs: Runs, step: int, loss: Row | None, beyond: list[Row]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The links of the chain that differ, each with what can be behind it; what follows from an earlier one is left."""
    truth, plan = runs.truth.steps[step - 1], runs.plan.steps[step - 1]
    if truth.lr != plan.lr:
        yield _rates(truth, plan, runs.plan.world)
    if truth.rows != plan.rows and (loss or _repeated(truth, plan)):
        yield f"the batches of step {step} are not the same: {_rows(truth, plan)}", (_DIVISION, _AUGMENTATION)
        return
    if loss:
        when = "before any update" if step == 1 else f"though the parameters agreed after step {step - 1}"
        yield f"the loss differs by {loss.difference:.1e}, {when}: {_ratio(truth, plan)}", _forward(runs, truth, plan)
        return
    gradient = next((row for row in gradients(runs, step, "gradient") if row.beyond), None)
    if gradient:
        uneven = next((rows for rows in plan.rows_of_ranks if len(set(rows)) > 1), None)
        shown = f"; the ranks had {' + '.join(map(str, uneven))} rows" if uneven else ""
        text = f"the losses agree, the gradient of {gradient.name} differs by {gradient.difference:.1e} after backward"
        yield text + shown, (_WEIGHTING, *_GRADIENT) if uneven else (*_GRADIENT, _WEIGHTING)
        return
    used = next((row for row in gradients(runs, step, "used") if row.beyond), None)
    if used and truth.gradient:
        text = f"the gradient agrees after backward, and differs by {used.difference:.1e} ({used.name}) when it is used"
        yield text, _CLIP
    elif used:
        yield f"the gradient that is used differs by {used.difference:.1e} ({used.name})", (*_GRADIENT, *_CLIP)
    elif any(row.trained for row in beyond) and truth.lr == plan.lr:
        yield "gradients and learning rates agree, the parameters do not", _UPDATE
    elif beyond and not any(row.trained for row in beyond):
        yield f"parameters agree, buffer {beyond[0].name} does not", (_BUFFERS,)


def _steps(runs: Runs) -> Fault | None:
    one, many = len(runs.truth.steps), len(runs.plan.steps)
    if one == many:
        return None
    evidence = f"{many} optimizer steps under the plan, {one} in one process"
    return Fault(step=min(one, many) + 1, what="number of steps", evidence=(evidence,), reasons=(_LENGTH,))


# Evidence in words.


def _rates(truth: Step, plan: Step, world: int) -> tuple[str, tuple[str, ...]]:
    one, many = next(((a, b) for a, b in zip(truth.lr, plan.lr, strict=False) if a != b), (math.nan, math.nan))
    scaled = one and any(math.isclose(many / one, factor, rel_tol=1e-6) for factor in (world, math.sqrt(world)))
    text = f"the learning rate is {many:g} under the plan and {one:g} in one process"
    return text, (_SCALED, _SCHEDULER) if scaled else (_SCHEDULER, _SCALED)


def _rows(one: Step, other: Step) -> str:
    """What became of the rows: `1 row more than once, 2 lost, 3 others`."""
    before, after = sum(one.rows, Counter[str]()), sum(other.rows, Counter[str]())
    again = sum(count - before[row] for row, count in after.items() if 0 < before[row] < count)
    lost = sum((before - after).values())
    foreign = sum(count for row, count in after.items() if row not in before)
    parts = [(again, "seen again"), (lost, "lost"), (foreign, "that should not be there")]
    said = ", ".join(f"{count} row{'s' if count > 1 else ''} {words}" for count, words in parts if count)
    return f"{said or 'the same rows in other batches'} (of {before.total()})"


def _repeated(one: Step, other: Step) -> bool:
    """Whether a row was seen again, or the number of rows is another: padding to a length cannot do that."""
    sizes = [rows.total() for rows in one.rows] != [rows.total() for rows in other.rows]
    return sizes or any(
        b[row] > count > 0 for a, b in zip(one.rows, other.rows, strict=False) for row, count in a.items()
    )


def _ratio(truth: Step, plan: Step) -> str:
    one, many = truth.losses[0], plan.losses[0]
    return f"{many:.7g} under the plan, {one:.7g} in one process"


def _forward(runs: Runs, truth: Step, plan: Step) -> tuple[str, ...]:
    if runs.plan.world > 1 and not any(step.rows for step in runs.plan.steps):
        return (_NO_LOADER, *_FORWARD)
    one, many = truth.losses[0], plan.losses[0]
    if one and math.isclose(many / one, 1 / runs.plan.world, rel_tol=0.2):
        return (_SUM, *_FORWARD)
    return (*_FORWARD, _SUM)


def _drifted(plan: Step) -> list[str]:
    names = ", ".join(plan.drifted[:3])
    return [f"the ranks do not hold the same: {names}"] if names else []


_SEED_WEIGHTS = "the model is made from an unseeded random state: call torch.manual_seed at the top of the script"
_SEED_ORDER = "the order of the data comes from an unseeded source: seed torch, random, numpy and every generator"
_AUGMENTATION = "random augmentation or noise inside the dataset or collate_fn: switch it off for verify"
_RANDOM = "a random layer that is not a dropout module (F.dropout, noise, sampling): switch it off for verify"
_ROW_ORDER = "a model or loss for which the order of rows in a batch matters: its result has no meaning over ranks"
_WEIGHTS_BY_RANK = "the model depends on the rank or the number of processes (a seed plus rank before dt.distribute)"
_DIVISION = "samples repeated or lost when batches are divided: a sampler or dataset of your own that looks at the rank"
_SUM = "the loss is a sum, not a mean: over ranks only means can be averaged; take the mean"
_WEIGHTING = (
    "ranks with unequal rows counted equally: a gradient must count by its rows; for tokens, dt.weight(loss, n)"
)
_CLIP = (
    "clipping by the norm of this rank's gradient, where the global norm is meant (torch.nn.utils.clip_grad_norm_)",
    "code between backward() and step() that changes p.grad by something of this rank alone",
)
_SCHEDULER = (
    "the scheduler is stepped more or less often than once per optimizer step (once per rank, or by len(loader))"
)
_SCALED = "the learning rate is multiplied by the number of workers: the global batch is the same, so leave it"
_BUFFERS = "a buffer follows this rank's rows only (running statistics of your own): average it with dt.mean"
_LENGTH = "the loop ends by something that depends on the rank or the number of processes (len of a divided dataset)"
_NO_LOADER = (
    "no loader was given, and every rank draws or reads batches by itself: give them to dt.distribute, batches made by "
    "hand as a generator, and iterate what comes back"
)
_FORWARD = (
    "a loss over pairs in the batch (contrastive, in-batch negatives) sees only this rank's rows",
    "a statistic of the batch computed by hand (a mean, a norm, a softmax over its rows) is one of this rank's rows",
    "a mean over tokens or masked targets that ranks have unequal numbers of: dt.weight(loss, n)",
    "a random layer that is not a dropout module draws other numbers on every rank",
    "a layer or buffer that follows this rank's rows only (running statistics of your own)",
)
_GRADIENT = (
    "gradients scaled twice or not at all: a sum instead of a mean, a factor of the number of workers",
    "a custom autograd function or a hook that uses something of this rank alone",
)
_UPDATE = (
    "the optimizer looks at more than the gradient it is given (its own norms, random state, rank)",
    "code after step() that changes parameters by something of this rank alone (averaging, projection)",
)
