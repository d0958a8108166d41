"""The scripts about optimizers under more plans and in one process, and what is not seen from their weights."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.run import RUN
from tests.mistakes.optimizers import ACCUMULATED, LATER, ORDERS
from tests.mistakes.table import Script
from tests.mistakes.test_mistakes import rows, told, wrong

LATE = [script for script in LATER if script.name in ("the optimizer is not given", "two optimizers are made later")]
RIGHT = [script for script in ORDERS if not script.says]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "plan", "scripts"),
    [
        (1, "ddp", [script for script in [*LATER, *ACCUMULATED] if not script.says]),
        (2, "local(every=1)", LATE[:1]),  # for SGD after every step: ddp
        pytest.param(2, "zero1", [*RIGHT, *LATER, *ACCUMULATED], marks=pytest.mark.long),
        pytest.param(2, "server(staleness=0)", RIGHT[:2], marks=pytest.mark.long),
        pytest.param(2, "groups(every=1)", [*RIGHT[:2], *LATE], marks=pytest.mark.long),
        pytest.param(2, "local(every=4,after=99)", [*RIGHT[:2], LATE[0]], marks=pytest.mark.long),
    ],
)
def test_right_under_other_plans(world: int, plan: str, scripts: list[Script], tmp_path: Path) -> None:
    table = {script.name: script for script in scripts}
    found = rows(world, tmp_path, plan, *table)
    assert len(found) == world * len(table)
    assert not [(row["name"], fault) for row in found if (fault := wrong(table[row["name"]], row))]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("plan", ["ddp,delay=1", pytest.param("server(staleness=0)", marks=pytest.mark.long)])
def test_refused_where_the_first_step_cannot_be_right(plan: str, tmp_path: Path) -> None:
    refused = Script(name=LATE[0].name, body="", before="", says=("SGD steps and was not given", plan))
    said = [row["said"] for row in rows(2, tmp_path, plan, refused.name)]
    assert len(said) == 2 and all(told(refused, text) for text in said)


@pytest.fixture
def model():
    here().loop.steps = 0
    yield nn.Linear(2, 1)
    release()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()


def test_a_later_call_goes_on_with_the_plan(model: nn.Module) -> None:
    dt.distribute(model, plan="accumulate=2")
    optimizer = dt.distribute(torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, optimizer, 4)
    assert here().loop.steps == 2


def test_steps_of_an_optimizer_that_is_met_are_counted_and_its_state_is_saved(model: nn.Module, tmp_path: Path) -> None:
    dt.distribute(model)
    steps(model, torch.optim.Adam(model.parameters()), 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    assert here().loop.steps == 3 and RUN.optimizers == [optimizer]
    state = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    dt.save(tmp_path / "c")
    steps(model, optimizer, 1)
    dt.load(tmp_path / "c")
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in state.items())


def test_optimizers_are_let_go_of(model: nn.Module) -> None:
    dt.distribute(model, plan="accumulate=2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    assert "step" in vars(optimizer)
    release()
    assert "step" not in vars(optimizer) and not _global_optimizer_pre_hooks
    before = model.weight.detach().clone()
    steps(model, optimizer, 1)
    assert not torch.equal(model.weight, before)
    assert torch.optim.lr_scheduler.LRScheduler.step.__module__ == "torch.optim.lr_scheduler"


def test_a_stranger_is_left_alone(model: nn.Module) -> None:
    dt.distribute(model, plan="accumulate=2")
    other = nn.Linear(2, 1)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    steps(other, stranger, 3)
    assert here().loop.steps == 0 and "step" not in vars(stranger) and not RUN.optimizers
    del other, stranger
    gc.collect()
