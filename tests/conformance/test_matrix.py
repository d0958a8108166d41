"""Every plan gives the weights of one process: a covering subset (all of it: `make matrix`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import cases as c
from tests.conformance import matrix

WAYS = {1: "shared", 2: "share", 3: "gloo", 4: "hosts,share"}
"""How the ranks of each world exchange here; through shared memory without more in the loops' tests."""


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truths")
    matrix.write_truths(list(c.all_trainings()), folder)
    return folder


def test_the_subset_covers() -> None:
    chosen = [case for world in (2, 3, 4) for case in c.covering(world)]
    for plan in c.PLANS:
        met = [case.training for case in chosen if case.plan == plan]
        for setting in ("optimizer", "model", "accumulation", "clip"):
            every = {getattr(training, setting) for training in c.all_trainings()}
            assert {getattr(training, setting) for training in met} == every, (plan, setting)
    assert all({case.plan for case in c.covering(world)} == set(c.PLANS) for world in (2, 3, 4))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", c.WORLDS)
def test_same_weights_as_one_process(world: int, truths: Path) -> None:
    chosen = c.covering(world)
    rows = matrix.run_world(world, chosen, truths, way=WAYS[world])
    faults = [
        (case, fault) for row, case in zip(rows, chosen, strict=True) if (fault := matrix.judge(row, case, truths))
    ]
    assert not faults
    assert len(rows) == len(chosen)
    if world > 1:
        assert all(min(row["buckets"]) >= 4 for row in rows)
