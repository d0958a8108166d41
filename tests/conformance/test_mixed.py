"""Wires and late gradients with two optimizers, and with parameters of several types: as written out."""

from __future__ import annotations

import pytest

from tests import forked

POOL = "tests.conformance.mixed_pool"


@pytest.mark.timeout(120)
def test_two_optimizers_and_several_types() -> None:
    ended = forked.run(2, POOL)
    assert ended.returncode == 0, ended.stderr
    assert "mixed as written out" in ended.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("what", "said"), [("forget", "wire=int4"), ("at once", "delay=1")])
def test_a_wrong_one_is_seen(what: str, said: str) -> None:
    ended = forked.run(2, POOL, what)
    assert ended.returncode != 0 and "AssertionError" in ended.stderr and said in ended.stderr
