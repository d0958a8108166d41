"""Servers that compensate delays, two of them with a bound, and one whose optimizer fails, in real processes."""

from __future__ import annotations

import pytest

from tests import forked

POOL = "tests.conformance.stale_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["compensated", "two", "fails"])
def test_servers(what: str) -> None:
    ended = forked.run(3, POOL, what)
    assert ended.returncode == 0, ended.stderr
    assert f"{what} as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "sabotage", "said"),
    [("compensated", "not compensated", "from the algorithm written out"), ("two", "no bound", "staleness")],
)
def test_a_wrong_server_is_seen(what: str, sabotage: str, said: str) -> None:
    ended = forked.run(3, POOL, what, sabotage)
    assert ended.returncode != 0 and "AssertionError" in ended.stderr and said in ended.stderr
