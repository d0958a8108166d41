"""Gradients applied one step later, under ddp and zero: equal to the algorithm written out, saved and loaded too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.late_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "shared"),
    [pytest.param(2, "1", marks=pytest.mark.long), (3, "0"), pytest.param(4, "1", marks=pytest.mark.long)],
)
def test_late_gradients(world: int, shared: str, tmp_path: Path) -> None:
    ended = forked.run(world, POOL, "equal", str(tmp_path), environ={"DISTRIBUTEDTORCH_SHARED": shared})
    assert ended.returncode == 0, ended.stderr
    assert "equal as written out" in ended.stdout


@pytest.mark.timeout(120)
def test_sums_that_take_their_time_hold_nobody(tmp_path: Path) -> None:
    ended = forked.run(2, POOL, "travels", str(tmp_path), environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(120)
def test_wires(tmp_path: Path) -> None:
    ended = forked.run(3, POOL, "wires", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "wires as written out" in ended.stdout


@pytest.mark.timeout(120)
def test_a_run_goes_on_after_a_load(tmp_path: Path) -> None:
    ended = forked.run(3, POOL, "saved", str(tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("part", "what", "said"),
    [
        ("equal", "applied at once", "from the algorithm written out"),
        ("travels", "landed at once", "nothing is under way"),
        pytest.param(
            "travels", "few at once", "is waited for before the next backward is over", marks=pytest.mark.long
        ),
        pytest.param("equal", "landed too late", "from the algorithm written out", marks=pytest.mark.long),
        ("wires", "kept apart", "wire=sign"),
        pytest.param("wires", "added twice", "wire=sign", marks=pytest.mark.long),
        pytest.param("wires", "overtaken", "wire=sign", marks=pytest.mark.long),
        ("saved", "lost at resume", "goes on in another way"),
        pytest.param("saved", "not dropped at load", "a gradient of other parameters", marks=pytest.mark.long),
    ],
)
def test_a_wrong_one_is_seen(part: str, what: str, said: str, tmp_path: Path) -> None:
    environ = {"DISTRIBUTEDTORCH_SHARED": "0" if what == "few at once" else "1"}
    ended = forked.run(2, POOL, part, str(tmp_path), what, environ=environ)
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr
