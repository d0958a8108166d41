"""Servers in processes of their own: what servers beside ranks do, at 1, 2 and 3 workers with 1 and 2 servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.apart_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        pytest.param(2, "server(apart,staleness=0)", marks=pytest.mark.long),
        (3, "server(apart,staleness=0,servers=2)"),
        (2, "server(apart,staleness=0,servers=2,rates=own),wire=int8"),
        pytest.param(3, "server(apart,staleness=2)", marks=pytest.mark.long),
        pytest.param(3, "server(apart,staleness=0,push=updates)", marks=pytest.mark.long),
        pytest.param(1, "server(apart,staleness=0,servers=2)", marks=pytest.mark.long),
        pytest.param(3, "server(apart,staleness=0)", marks=pytest.mark.long),
        pytest.param(2, "server(apart,staleness=0,servers=2)", marks=pytest.mark.long),
        pytest.param(2, "server(apart,staleness=0,push=updates,every=2),wire=bf16", marks=pytest.mark.long),
        pytest.param(2, "server(apart,staleness=0,rates=own)", marks=pytest.mark.long),
    ],
)
def test_apart(workers: int, plan: str, tmp_path: Path) -> None:
    servers = 2 if "servers=2" in plan else 1
    ended = forked.run(workers + servers, POOL, str(tmp_path), plan)
    assert ended.returncode == 0, ended.stderr
    assert "servers of their own as written out" in ended.stdout
    assert f"{workers} worker{'s' if workers > 1 else ''}, {servers} server" in ended.stderr
    assert {path.name for path in tmp_path.glob("after.*")} == {f"after.{rank}" for rank in range(workers)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("own values", "not what servers beside ranks give, in epoch 0", marks=pytest.mark.long),
        pytest.param("state again", "is ddp", marks=pytest.mark.long),
        ("own rates", "not what servers beside ranks give"),
        pytest.param("no state", "state is with the servers only", marks=pytest.mark.long),
        ("no bound", "a push of staleness"),
    ],
)
def test_a_server_that_does_otherwise_is_seen(how: str, said: str, tmp_path: Path) -> None:
    plan = "server(apart,staleness=1)" if how == "no bound" else "server(apart,staleness=0)"
    ended = forked.run(3 if how != "no bound" else 4, POOL, str(tmp_path), plan, how)
    assert ended.returncode != 0 and said in ended.stderr
