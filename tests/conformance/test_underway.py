"""Rounds that travel beside the next steps: equal to the algorithm written out plainly, at 2, 3 and 4 ranks."""

from __future__ import annotations

import pytest

from tests import forked

POOL = "tests.conformance.underway_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "shared"),
    [pytest.param(2, "1", marks=pytest.mark.long), (3, "0"), pytest.param(4, "1", marks=pytest.mark.long)],
)
def test_rounds_under_way(world: int, shared: str) -> None:
    ended = forked.run(world, POOL, environ={"DISTRIBUTEDTORCH_SHARED": shared})
    assert ended.returncode == 0, ended.stderr
    assert "rounds under way as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("at once", "from the algorithm written out"),
        pytest.param("all of it", "from the algorithm written out", marks=pytest.mark.long),
        pytest.param("nobody asked", "a load is no movement", marks=pytest.mark.long),
        ("waits", "round/0"),
        pytest.param("one at a time", "second sums wait for the end of a round", marks=pytest.mark.long),
        pytest.param("never let go", "a round is under way where replicas step together", marks=pytest.mark.long),
    ],
)
def test_wrong_ones_are_seen(what: str, said: str) -> None:
    ended = forked.run(2, POOL, what, environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr
