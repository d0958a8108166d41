"""What servers may be told to do, in real processes: as written out plainly, and wrong ones are seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.served_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("what", ["rates", "updates", "rows", "wires"])
def test_as_written_out(what: str, world: int, tmp_path: Path) -> None:
    ended = forked.run(world, POOL, what, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert f"{what} as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "sabotage", "said"),
    [
        ("rates", "options stay at home", "from the algorithm written out"),
        ("updates", "a change counts whole", "from the algorithm written out"),
        pytest.param("updates", "state of rank 0", "another rank's state after dt.load", marks=pytest.mark.long),
        ("rows", "rows forgotten", "from the algorithm written out"),
        ("wires", "left out and lost", "from the algorithm written out"),
    ],
)
def test_what_is_wrong_is_seen(what: str, sabotage: str, said: str, tmp_path: Path) -> None:
    ended = forked.run(2, POOL, what, str(tmp_path), sabotage)
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr
