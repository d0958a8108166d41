"""Rounds by the clock, in 16 bits and in another world; what does not fit is refused, and what is scored is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.rounds_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("what", ["clock", "narrow", "misfit"])
def test_rounds(what: str, world: int, tmp_path: Path) -> None:
    ended = forked.run(world, POOL, what, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert f"{what} as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("what", "sabotage"), [("clock", "another pace"), ("narrow", "in 16 bits")])
def test_wrong_rounds_are_seen(what: str, sabotage: str, tmp_path: Path) -> None:
    ended = forked.run(3, POOL, what, str(tmp_path), sabotage)
    assert ended.returncode != 0 and "AssertionError" in ended.stderr, ended.stderr


@pytest.mark.timeout(120)
def test_the_outer_optimizer_goes_on_in_another_world(tmp_path: Path) -> None:
    assert forked.run(3, POOL, "leave", str(tmp_path)).returncode == 0
    ended = forked.run(2, POOL, "enter", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    for what in ("begin anew", "never ends"):
        ended = forked.run(2, POOL, "enter", str(tmp_path), what)
        assert ended.returncode != 0 and "from the algorithm written out" in ended.stderr, ended.stderr


@pytest.mark.timeout(120)
def test_an_evaluation_of_replicas_that_differ_says_so_once(tmp_path: Path) -> None:
    ended = forked.run(2, POOL, "scored", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.count("scored by its own replica")
    assert said == 3, ended.stderr  # once per plan whose replicas differ, not after dt.sync()
