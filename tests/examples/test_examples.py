"""Every example is two lines away from single.py and prints what it prints; strategies and the demo agree with it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import forked

FOLDER = Path(__file__).parents[2] / "examples"
FACES = ("mirrored", "parameter_server", "hierarchical_topk")
NOT_PLANS = {"demo", "gpt", "listing", "measured", "resnet", "single", *FACES}
PLANS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_PLANS)
STEPS = "10"


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, command)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process prints."""
    ended = run(tmp_path_factory.mktemp("single"), FOLDER / "single.py", "--steps", STEPS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("validation loss") == 1
    return ended.stdout


def test_there_are_examples() -> None:
    assert {"ddp", "zero1", "zero2", "zero3"} <= set(PLANS)


@pytest.mark.parametrize("plan", PLANS)
def test_an_example_is_two_lines_more_than_single(plan: str) -> None:
    single, example = ((FOLDER / f"{name}.py").read_text().splitlines() for name in ("single", plan))
    changes = [line for line in difflib.ndiff(single, example) if not line.startswith("  ")]
    assert changes[0] == "+ import distributedtorch as dt"
    assert (
        changes[1].startswith("+ ")
        and f'dt.distribute(model, optimizer, loader, scheduler, plan="{plan}"' in changes[1]
    )
    assert len(changes) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_an_example_prints_what_one_process_prints(plan: str, truth: str, tmp_path: Path) -> None:
    script = FOLDER / f"{plan}.py"
    if plan == "ddp":
        ended = run(tmp_path, script, "--steps", STEPS)
    else:
        ended = forked.run(2, str(script), "--steps", STEPS, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 workers" in ended.stderr and f"plan {plan}" in ended.stderr
    assert ended.stdout == truth


@pytest.fixture(scope="module")
def losses() -> str:
    """What a step over whole batches prints, whichever strategy it stands in."""
    ended = forked.run(1, "examples.mirrored")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("loss") == 3
    return ended.stdout


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("face", FACES)
def test_a_strategy_prints_the_losses_of_one_process(face: str, world: int, losses: str, tmp_path: Path) -> None:
    ended = forked.run(world, f"examples.{face}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == losses
    assert f"{world} workers (dt.launch" in ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("face", FACES)
def test_a_strategy_starts_its_workers(face: str, losses: str, tmp_path: Path) -> None:
    ended = run(tmp_path, FOLDER / f"{face}.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == losses
    assert f"{2 if face == 'mirrored' else 4} workers (call)" in ended.stderr


@pytest.mark.long
def test_the_demo_agrees_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    plt = pytest.importorskip("matplotlib.pyplot")
    ended = run(tmp_path, FOLDER / "demo.py", "--steps", 5)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {line.split()[0]: line.split() for line in ended.stdout.splitlines() if line.startswith(("ddp", "zero"))}
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    assert "NOT THE SAME" not in ended.stdout
    height, width, _ = plt.imread(tmp_path / "demo.png").shape
    assert width > height > 400
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The demo as a module."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("demo", FOLDER / "demo.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up(demo: ModuleType) -> Any:
    return demo.Run(
        name="zero1",
        losses=[4.0, 3.0],
        validation=3.5,
        bytes_kept=dict.fromkeys(demo.KINDS, 1),
        bytes_sent=0,
        seconds=1.0,
        weights={"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([1e-3])},
    )


def test_the_demo_says_nothing_of_equal_runs(demo: ModuleType) -> None:
    assert demo.faults(made_up(demo), [made_up(demo)]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([1.001e-3])}}, "weights"),
        ({"weights": {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([1e-3])}}, "weights"),
        ({"losses": [4.0, 3.001]}, "losses"),
        ({"validation": float("nan")}, "losses"),
    ],
)
def test_the_demo_names_a_plan_that_differs(demo: ModuleType, change: dict[str, Any], said: str) -> None:
    truth = made_up(demo)
    found = demo.faults(truth, [dataclasses.replace(truth, **change)])
    assert len(found) == 1 and "zero1" in found[0] and said in found[0]
    assert demo.conclude(demo.Console(quiet=True), found, Path("demo.png")) == 1


def test_the_demo_shows_what_a_failed_run_said(demo: ModuleType, tmp_path: Path) -> None:
    with demo.Progress(disable=True) as progress, pytest.raises(demo.RunFailed, match=r"exit code 2(.|\n)*zero9"):
        demo.train("zero9", 1, tmp_path / "failed", progress)
