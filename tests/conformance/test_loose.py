"""Replicas that step alone, and wires: equal to their algorithms written out plainly, at 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

LOOSE, WIRES = "tests.conformance.loose_pool", "tests.conformance.wires_pool"
FACTORS = "tests.conformance.factors_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_rounds(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, LOOSE, "rounds", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "rounds as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["one rank keeps its own", "always the same pairs"])
def test_a_wrong_round_is_seen(what: str, tmp_path: Path) -> None:
    ended = forked.run(3, LOOSE, "rounds", str(tmp_path), what)
    assert ended.returncode != 0 and "from the algorithm written out" in ended.stderr


@pytest.mark.timeout(120)
def test_a_checkpoint_holds_replicas_and_what_wires_left_out(tmp_path: Path) -> None:
    ended = forked.run(3, LOOSE, "saved", str(tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(120)
def test_replicas_that_were_not_saved_are_missed(tmp_path: Path) -> None:
    ended = forked.run(2, LOOSE, "saved", str(tmp_path), "replicas not saved")
    assert ended.returncode != 0 and "another replica after dt.load" in ended.stderr
    ended = forked.run(2, LOOSE, "saved", str(tmp_path), "under way not saved")
    assert ended.returncode != 0 and "delay=2: goes on in another way after dt.load" in ended.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_wires(world: int) -> None:
    ended = forked.run(world, WIRES)
    assert ended.returncode == 0, ended.stderr
    assert "wires as written out" in ended.stdout


@pytest.mark.timeout(120)
def test_a_wire_that_forgets_what_it_left_out_is_seen() -> None:
    ended = forked.run(2, WIRES, "forget")
    assert ended.returncode != 0 and "ddp,wire=int4: " in ended.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("world", [2, 3])
def test_factors(world: int, shared: str) -> None:
    ended = forked.run(world, FACTORS, environ={"DISTRIBUTEDTORCH_SHARED": shared})
    assert ended.returncode == 0, ended.stderr
    assert "factors as they should be" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.long
def test_factors_between_hosts_hold_nobody() -> None:
    ended = forked.run(4, "tests.hosts", "0,0,1,1", FACTORS)
    assert ended.returncode == 0, ended.stderr
    held = forked.run(4, "tests.hosts", "0,0,1,1", FACTORS, "held")
    assert held.returncode != 0 and "waits in" in held.stderr, held.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("late", "second factors wait for the end of backward"),
        ("keep", "something of an overflow is kept"),
        ("whole", "a gradient of 1e+160 stays"),
        ("early", "said to have arrived before it has"),
    ],
)
def test_wrong_factors_are_seen(what: str, words: str) -> None:
    ended = forked.run(2, FACTORS, what, environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0 and words in ended.stderr
