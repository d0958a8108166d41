"""Tables of which only the rows that some rank used travel, by every code that has something of every number."""

from __future__ import annotations

import pytest

from tests import forked

POOL = "tests.conformance.used_rows_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_used_rows(world: int) -> None:
    ended = forked.run(world, POOL)
    assert ended.returncode == 0, ended.stderr
    assert "used rows as written out" in ended.stdout


@pytest.mark.timeout(120)
def test_what_codes_leave_out_of_rows_has_to_be_kept() -> None:
    ended = forked.run(2, POOL, "forget")
    assert ended.returncode != 0
    assert "int2: table is" in ended.stderr
