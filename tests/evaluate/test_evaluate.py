"""Evaluation over ranks is evaluation in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.evaluate import pool
from tests.evaluate.cases import classified, names
from tests.evaluate.refusals import REFUSALS
from tests.evaluate.sabotage import SABOTAGES


def run(world: int, folder: Path) -> list[dict[str, Any]]:
    done = folder / "done.jsonl"
    environ = {"PYTHONWARNINGS": "ignore"}
    ended = forked.run(world, "tests.evaluate.pool", str(done), cwd=folder, timeout=170, environ=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(row) for row in done.read_text().splitlines()]


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_results_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    told = list(pool.rows()) if world == 1 else run(world, tmp_path)
    rows = {row["case"]: row for row in told if "case" in row}
    assert rows.keys() == {*names(world), *(f"refuses {attempt.__name__}" for attempt in REFUSALS if world > 1)}
    assert not [row for row in rows.values() if not row["difference"] <= 1e-9]
    assert not [row for row in rows.values() if not row["agree"]]
    broken = {row["sabotage"]: row["difference"] for row in told if "sabotage" in row}
    assert broken.keys() == (SABOTAGES.keys() if world == 2 else set())
    assert not [name for name, gap in broken.items() if not gap > 1e-6], "a broken build was not caught"


def test_torchmetrics_are_in_the_table() -> None:
    pytest.importorskip("torchmetrics")
    assert "AUROC" in classified(sync=True)
