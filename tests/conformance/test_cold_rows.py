"""Rows of tables that count by how often replicas use them: equal to that written out plainly, at 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.cold_rows_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world", "shared"), [(2, "1"), (3, "0"), (4, "1")])
def test_cold_rows(world: int, shared: str, tmp_path: Path) -> None:
    ended = forked.run(world, POOL, str(tmp_path), environ={"DISTRIBUTEDTORCH_SHARED": shared})
    assert ended.returncode == 0, ended.stderr
    assert "cold rows as written out" in ended.stdout
    assert ended.stderr.count("rows=used changes nothing: no embedding is trained with 0.weight") == 1
    assert ended.stderr.count("rows=used leaves table.weight as it is: an nn.Linear has it too") == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("all alike", "from the algorithm written out"),
        ("from here", "from the algorithm written out"),
        ("plain mean", ", then ddp: "),
        ("not saved", "goes on in another way after dt.load"),
        ("shared counts double", "what all have moved counts more than once"),
        ("after the step", "set()"),
        ("forget", "what wires have left out"),
    ],
)
def test_wrong_ones_are_seen(what: str, said: str, tmp_path: Path) -> None:
    ended = forked.run(2, POOL, str(tmp_path), what, environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr
