"""Shared memory where things go wrong: ranks killed or stopped inside an exchange, what a host refuses or has much of.

All runs are made by one process that has torch (`faults_pool`); beside each stands one that is broken on purpose.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Ask = Callable[..., list[str]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Make a run of so many ranks with these words; what was wrong about it."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.core.faults_pool"]
    pool = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    to, back = pool.stdin, pool.stdout
    assert to is not None and back is not None

    def ask(case: str, ranks: int, *words: str) -> list[str]:
        print(case, ranks, *words, file=to, flush=True)
        faults: list[str] = json.loads(back.readline())
        return faults

    with pool:
        try:
            yield ask
            to.close()
            assert pool.wait(20) == 0
        finally:
            pool.kill()  # and its ranks with it


@pytest.mark.timeout(100)
def test_a_killed_rank_is_named_by_all_survivors(ask: Ask) -> None:
    assert ask("killed", 2) == []
    assert ask("killed", 4) == []


@pytest.mark.timeout(100)
def test_a_survivor_that_is_blamed_and_a_process_that_is_left_are_seen(ask: Ask) -> None:
    faults = ask("killed", 3, "not-followed", "orphan")
    assert faults.pop() == "rank 1 said: rank 0 is gone (its process has ended)"
    kinds = {re.sub(r"\d+", "N", fault) for fault in faults}
    assert kinds == {"process N is left", "a segment in /proc/N is left", "/proc/N/fd/N is left"}


@pytest.mark.timeout(100)
def test_a_stopped_rank_is_named_and_goes_on(ask: Ask) -> None:
    assert ask("stopped", 3) == []
    assert ask("stopped", 2, "blind") == ["not named in time"]


@pytest.mark.timeout(100)
def test_without_a_segment_on_one_rank_all_use_gloo_and_say_why(ask: Ask) -> None:
    assert ask("learned", 2, "refused") == []
    (fault,) = ask("learned", 2, "refused", "silent")
    assert "gloo (no shared memory: ) on cpu" in fault


@pytest.mark.timeout(100)
def test_a_kernel_without_futex_waitv(ask: Ask) -> None:
    assert ask("exchanged", 3, "old-kernel") == []
    assert ask("exchanged", 3, "old-kernel", "restless") == ["nobody slept"]


@pytest.mark.timeout(100)
def test_sixteen_ranks_on_one_host(ask: Ask) -> None:
    assert ask("exchanged", 16) == []
    (fault,) = ask("exchanged", 3, "drop")
    assert "all-reduce of 4099 torch.float32" in fault


@pytest.mark.timeout(100)
def test_forked_data_workers_beside_shared_memory(ask: Ask) -> None:
    assert ask("learned", 2, "data-workers") == []
    assert "other weights than in one process" in ask("learned", 2, "drop")
