"""Every plan gives the weights of one process: a covering subset (all of it: `make matrix`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import cases as c
from tests.conformance import matrix


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truths")
    matrix.write_truths(list(c.all_trainings()), folder)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", c.WORLDS)
def test_same_weights_as_one_process(world: int, truths: Path) -> None:
    chosen = c.covering(world)
    rows = matrix.run_world(world, chosen, truths)
    faults = [
        (case, fault) for row, case in zip(rows, chosen, strict=True) if (fault := matrix.judge(row, case, truths))
    ]
    assert not faults
    assert len(rows) == len(chosen)
    if world > 1:
        assert all(min(row["buckets"]) >= 4 for row in rows)
