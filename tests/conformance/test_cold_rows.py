"""Rows of tables that count by how often replicas use them: equal to that written out plainly, at 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.cold_rows_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "shared"),
    [pytest.param(2, "1", marks=pytest.mark.long), (3, "0"), pytest.param(4, "1", marks=pytest.mark.long)],
)
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
        pytest.param("from here", "from the algorithm written out", marks=pytest.mark.long),
        pytest.param("plain mean", ", then ddp: ", marks=pytest.mark.long),
        pytest.param("not saved", "goes on in another way after dt.load", marks=pytest.mark.long),
        pytest.param("shared counts double", "what all have moved counts more than once", marks=pytest.mark.long),
        pytest.param("after the step", "set()", marks=pytest.mark.long),
        ("forget", "what wires have left out"),
    ],
)
def test_wrong_ones_are_seen(what: str, said: str, tmp_path: Path) -> None:
    ended = forked.run(2, POOL, str(tmp_path), what, environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr
