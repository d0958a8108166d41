"""Schedules against formulas written out, decisions in one process, and everything that is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.distribute import release

pytestmark = pytest.mark.timeout(60)
LRS = (0.5, 0.02)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    release()


def make(kind: Any = torch.optim.SGD, **kwargs: Any) -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": LRS[0]}, {"params": [model.bias], "lr": LRS[1]}]
    return kind(groups, lr=1.0, **kwargs)


def lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def drive(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The learning rates that the first `steps` optimizer steps use."""
    used = []
    for _ in range(steps):
        used.append(lrs(optimizer))
        optimizer.step()
        scheduler.step()
    return used


def triangle(k: int) -> float:
    """Between 0.25 and 1 in cycles of 6 steps."""
    return 0.25 + 0.75 * (1 - abs(k % 6 - 3) / 3)


CURVES: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("constant", {}, lambda k: 1.0),
    ("constant", {"warmup": 4}, lambda k: min(1.0, (k + 1) / 5)),
    ("linear", {"steps": 10}, lambda k: max(0.0, 1 - k / 10)),
    ("linear", {"steps": 10, "floor": 0.2}, lambda k: max(0.2, 1 - 0.08 * k)),
    ("linear", {"steps": 12, "warmup": 2}, lambda k: (k + 1) / 3 if k < 2 else max(0.0, 1 - (k - 2) / 10)),
    ("cosine", {"steps": 10}, lambda k: (1 + math.cos(math.pi * min(k, 10) / 10)) / 2),
    (
        "cosine",
        {"steps": 14, "warmup": 4, "floor": 0.1},
        lambda k: (k + 1) / 5 if k < 4 else 0.1 + 0.9 * (1 + math.cos(math.pi * min(k - 4, 10) / 10)) / 2,
    ),
    ("multistep", {"milestones": [3, 7]}, lambda k: 1.0 if k < 3 else 0.1 if k < 7 else 0.01),
    (
        "multistep",
        {"milestones": [5, 9], "gamma": 0.5, "warmup": 2},
        lambda k: (k + 1) / 3 if k < 2 else 1.0 if k < 5 else 0.5 if k < 9 else 0.25,
    ),
    ("cyclic", {"cycle": 6, "floor": 0.25}, triangle),
    ("cyclic", {"cycle": 6, "floor": 0.25, "warmup": 3}, lambda k: 0.25 * (k + 1) / 4 if k < 3 else triangle(k - 3)),
]
NAMES = [f"{kind} {options}" for kind, options, _ in CURVES]


@pytest.mark.parametrize(("kind", "options", "formula"), CURVES, ids=NAMES)
def test_every_group_follows_the_formula(kind: str, options: dict[str, Any], formula: Callable[[int], float]) -> None:
    optimizer = make()
    scheduler = dt.schedule(optimizer, kind, **options)
    assert isinstance(scheduler, LRScheduler)
    for k, used in enumerate(drive(optimizer, scheduler, 18)):
        assert used == pytest.approx([lr * formula(k) for lr in LRS], rel=1e-12, abs=1e-15)
    assert scheduler.get_last_lr() == lrs(optimizer)


@pytest.mark.parametrize(("kind", "options", "formula"), CURVES, ids=NAMES)
def test_state_goes_into_another_one(kind: str, options: dict[str, Any], formula: Callable[[int], float]) -> None:
    first, second = make(), make()
    scaled = {**options, "batch": 64, "base_batch": 16, "scale": "sqrt"}
    old, new = dt.schedule(first, kind, **scaled), dt.schedule(second, kind, **scaled)
    drive(first, old, 5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    expected = [pytest.approx([2 * lr * formula(k) for lr in LRS], rel=1e-12, abs=1e-15) for k in range(5, 15)]
    assert drive(second, new, 10) == expected


@pytest.mark.parametrize(("scale", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
@pytest.mark.parametrize("kind", ["constant", "plateau"])
def test_scaling_is_by_the_global_batch_and_said(
    kind: str, scale: str, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = make()
    dt.schedule(optimizer, kind, batch=256, base_batch=64, scale=scale)
    assert lrs(optimizer) == [lr * factor for lr in LRS]
    said = f"lr 0.5 -> {0.5 * factor:g}, 0.02 -> {0.02 * factor:g} ({scale}: batch 256 / base batch 64)"
    assert capsys.readouterr().err == f"distributedtorch: {said}\n"


def test_nothing_is_said_or_multiplied_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = make(momentum=0.3)
    dt.schedule(optimizer, "cyclic", cycle=4)
    assert capsys.readouterr().err == ""
    assert [group["momentum"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_momentum_cycles_against_the_learning_rate_when_asked() -> None:
    optimizer = make(torch.optim.Adam)
    scheduler = dt.schedule(optimizer, "cyclic", cycle=4, warmup=2, base_momentum=0.7, max_momentum=0.9)
    betas = []
    for _ in range(6):
        betas.append(optimizer.param_groups[1]["betas"][0])
        optimizer.step()
        scheduler.step()
    assert betas == pytest.approx([0.9, 0.9, 0.9, 0.8, 0.7, 0.8])


def test_learning_rates_that_are_tensors_stay_tensors() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.5), foreach=False, capturable=False)
    scheduler = dt.schedule(optimizer, "linear", steps=4, batch=2, base_batch=1, scale="linear")
    assert drive(optimizer, scheduler, 5) == [[1.0], [0.75], [0.5], [0.25], [0.0]]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_plateau_is_torchs_after_its_warm_up() -> None:
    optimizer = make()
    scheduler = dt.schedule(optimizer, "plateau", warmup=2, patience=1, factor=0.5)
    assert isinstance(scheduler, ReduceLROnPlateau)
    used = drive(optimizer, scheduler, 1)
    scheduler.step(9.0)  # not judged: the learning rate is still rising
    used += drive(optimizer, scheduler, 2)
    assert used == [pytest.approx([lr * part for lr in LRS]) for part in (1 / 3, 2 / 3, 1)]
    metrics: list[Any] = [2.0, torch.tensor(2.5, requires_grad=True), np.float32(3.0), 1, 0.5]
    halves = []
    for metric in metrics:
        scheduler.step(metric)
        halves.append(lrs(optimizer)[0] / LRS[0])
    assert halves == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5])
    kept = copy.deepcopy(scheduler.state_dict())
    other = dt.schedule(make(), "plateau", warmup=2, patience=1, factor=0.5)
    other.load_state_dict(kept)
    assert other.state_dict() == kept


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["linear", "plateau"])
def test_windows_of_several_batches_count_as_one_step(kind: str, late: bool, tmp_path: Path) -> None:
    """`accumulate=2`: made before or after dt.distribute, the scheduler moves once per window and can be saved."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.randn(8, 3)), 1)
    options: dict[str, Any] = {"steps": 4} if kind == "linear" else {"patience": 0, "factor": 0.5}
    scheduler = None if late else dt.schedule(optimizer, kind, **options)
    given = [model, optimizer, data] + ([] if late else [scheduler])
    model, optimizer, data, *_ = dt.distribute(*given, plan="accumulate=2")
    if late:
        scheduler = dt.schedule(optimizer, kind, **options)
        assert dt.distribute(scheduler) is scheduler
    assert scheduler is not None
    used = []
    for (x,) in data:
        model(x).mean().backward()
        optimizer.step()
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step(*([1.0] if kind == "plateau" else []))
    assert used == (
        [1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25] if kind == "linear" else [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    )
    state = copy.deepcopy(scheduler.state_dict())
    dt.save(tmp_path / "saved")
    scheduler.last_epoch = 0
    dt.load(tmp_path / "saved")
    assert scheduler.state_dict() == state


# Decisions.


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({"patience": 2}, [3, 2, 2, 2], 3),
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 5),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.0], 2),
        ({"patience": 2, "mode": "max"}, [0.1, 0.5, 0.4, torch.tensor(0.5)], 3),
        ({"patience": 2}, [math.inf, math.inf, math.inf], 2),
        ({"patience": 3}, [3, 2, 1, 1, 1], None),
    ],
)
def test_early_stop(options: dict[str, Any], values: list[Any], stops_at: int | None) -> None:
    stop = dt.EarlyStop(**options)
    assert next((number for number, value in enumerate(values) if stop(value)), None) == stops_at


def test_early_stop_goes_on_from_its_state() -> None:
    first, second = dt.EarlyStop(patience=2), dt.EarlyStop(patience=2)
    assert [first(1.0), first(2.0)] == [False, False]
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"best": 1.0, "waited": 1}
    assert second(1.0)


def test_flags_in_one_process() -> None:
    for flag in (True, torch.tensor(True), np.bool_(True), 1):
        assert dt.any(flag) is True
        assert dt.all(flag) is True
    assert dt.any(False) is False
    assert dt.all(torch.tensor([False])) is False


# What is refused: each says what was given, what is needed, what to do.


def schedule(kind: str, **kwargs: Any) -> LRScheduler:
    return dt.schedule(make(), kind, **kwargs)


def scaled_twice() -> None:
    optimizer = make()
    for _ in range(2):
        dt.schedule(optimizer, "constant", batch=2, base_batch=1, scale="linear")


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown kind": (lambda: schedule("cosin", steps=5), ("'cosin'", "'cosine'", "plateau")),
    "far from any kind": (lambda: schedule("xyz"), ("'xyz'", "constant, linear")),
    "option of another kind": (lambda: schedule("cosine", steps=5, milestones=[2]), ("milestones", "floor")),
    "option with a typing error": (lambda: schedule("plateau", patince=5), ("patince", "'patience'")),
    "cosine without steps": (lambda: schedule("cosine"), ("cosine", "without steps", "len(loader)")),
    "linear without steps": (lambda: schedule("linear", warmup=3), ("linear", "without steps")),
    "steps 0": (lambda: schedule("linear", steps=0), ("steps=0", "from 1")),
    "steps by a fraction": (lambda: schedule("linear", steps=9.5), ("steps=9.5", "whole number")),
    "warm-up below 0": (lambda: schedule("constant", warmup=-1), ("warmup=-1", "from 0")),
    "warm-up as long as all": (lambda: schedule("cosine", steps=5, warmup=5), ("warmup=5", "steps=5", "fewer")),
    "scale without base": (lambda: schedule("constant", scale="linear", batch=4), ("without base_batch", "chosen for")),
    "scale without batch": (lambda: schedule("constant", scale="sqrt", base_batch=4), ("without batch", "global")),
    "batch without scale": (lambda: schedule("constant", batch=4, base_batch=2), ("without scale", "linear")),
    "batch 0": (lambda: schedule("constant", scale="linear", batch=0, base_batch=2), ("batch=0", "more than 0")),
    "unknown scale": (lambda: schedule("constant", scale="cubic", batch=1, base_batch=2), ("'cubic'", "sqrt")),
    "scaled twice": (scaled_twice, ("already", "multiply them once")),
    "milestones falling": (lambda: schedule("multistep", milestones=[9, 4]), ("[9, 4]", "larger", "[4, 9]")),
    "milestones repeated": (lambda: schedule("multistep", milestones=[4, 4]), ("[4, 4]", "do: milestones=[4]")),
    "no milestones": (lambda: schedule("multistep"), ("milestones=[]", "at least one")),
    "milestone in the warm-up": (lambda: schedule("multistep", milestones=[4], warmup=5), ("[4]", "after the warm-up")),
    "floor over 1": (lambda: schedule("cosine", steps=5, floor=2), ("floor=2", "fraction")),
    "cyclic without cycle": (lambda: schedule("cyclic"), ("without cycle", "up and down")),
    "odd cycle": (lambda: schedule("cyclic", cycle=5), ("cycle=5", "even")),
    "cyclic from 0": (lambda: schedule("cyclic", cycle=4, floor=0), ("floor=0", "between 0 and 1")),
    "plateau without a metric": (lambda: schedule("plateau").step(), ("without a metric", "step(loss)")),
    "plateau given text": (lambda: schedule("plateau").step("low"), ("'low'", "one number")),  # type: ignore[arg-type]
    "plateau never warm": (lambda: schedule("plateau", warmup=3).step(1), ("never called", "every optimizer.step()")),
    "patience 0": (lambda: dt.EarlyStop(patience=0), ("patience=0", "from 1")),
    "min_delta below 0": (lambda: dt.EarlyStop(min_delta=-1), ("min_delta=-1", "0 or more")),
    "unknown mode": (lambda: dt.EarlyStop(mode="least"), ("'least'", "min")),
    "NaN": (lambda: dt.EarlyStop()(math.nan), ("NaN", "diverged", "dt.any")),
    "text for a value": (lambda: dt.EarlyStop()("0.5"), ("'0.5'", "one number")),  # type: ignore[arg-type]
    "nothing for a value": (lambda: dt.EarlyStop()(None), ("None", "one number")),  # type: ignore[arg-type]
    "many values": (lambda: dt.EarlyStop()(torch.ones(3)), ("shape (3,)", "mean()")),
    "any of many": (lambda: dt.any([True, False]), ("list", "one bool", "Python's any")),  # type: ignore[arg-type]
    "all of many": (lambda: dt.all(torch.ones(2)), ("Tensor", "one bool")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises(dt.UsageError) as refusal:
        call()
    for words in (*says, "needed:", "do:"):
        assert words in str(refusal.value)


def test_a_refused_schedule_changes_nothing() -> None:
    optimizer = make()
    with pytest.raises(dt.UsageError):
        dt.schedule(optimizer, "multistep", batch=4, base_batch=2, scale="linear")
    assert lrs(optimizer) == list(LRS)
