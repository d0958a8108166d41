"""Parameter servers in real processes: rounds are ddp, histories are as written out, what is wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.server_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_servers(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, POOL, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "servers as written out" in ended.stdout


@pytest.mark.timeout(120)
def test_a_server_that_does_not_keep_to_the_bound_is_seen(tmp_path: Path) -> None:
    ended = forked.run(3, POOL, str(tmp_path), "no bound")
    assert ended.returncode != 0 and "server(staleness=1): a push of staleness" in ended.stderr
