"""Parameters once per host: memory, edits, fences, and where it cannot be had."""

from __future__ import annotations

import pytest

from tests import forked

POOL = "tests.conformance.share_pool"


@pytest.mark.timeout(120)
def test_once_per_host_and_nobody_looks_while_they_change() -> None:
    ended = forked.run(3, POOL)
    assert ended.returncode == 0, ended.stderr
    assert "once per host" in ended.stdout


@pytest.mark.timeout(120)
def test_a_missing_fence_is_seen() -> None:
    ended = forked.run(2, POOL, "sabotage")
    assert ended.returncode != 0
    assert "changed under rank 0" in ended.stderr


@pytest.mark.timeout(120)
def test_refused_without_shared_memory() -> None:
    ended = forked.run(2, POOL, environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0
    assert "the ranks share no memory (switched off by DISTRIBUTEDTORCH_SHARED=0)" in ended.stderr
    assert "leave `share` out of the plan" in ended.stderr
