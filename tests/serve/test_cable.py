"""A server on a host of its own, and its cable: cut for a moment nothing is lost, cut for good both ends say so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import bed as beds
from tests.bed import Bed

ROOT = Path(__file__).parents[2]
SECONDS = 100.0

pytestmark = [
    pytest.mark.skipif(bool(why := beds.missing("ip")), reason=why or "-"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]


def start(bed: Bed, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Workers on host 0, the server on host 1."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    common |= {"WORLD_SIZE": "3", "MASTER_ADDR": bed.address(0), "MASTER_PORT": "29571"}
    processes = []
    for rank, (host, local, near) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(near)}
        with (folder / f"err.{rank}").open("wb") as err:
            words = [sys.executable, str(ROOT / "tests/serve/cable_job.py")]
            processes.append(bed.popen(host, *words, env={**common, **place}, cwd=folder, stderr=err))
    return processes


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(folder: Path) -> int:
    """Of the slower worker."""
    paths = [folder / f"steps.{rank}" for rank in range(2)]
    return min(int(path.read_text() or 0) if path.exists() else 0 for path in paths)


def said(folder: Path, rank: int) -> str:
    return (folder / f"err.{rank}").read_text()


def test_a_cable_that_is_cut_until_the_connection_is_lost(tmp_path: Path) -> None:
    with Bed(hosts=2) as bed:
        job = start(bed, tmp_path)
        until(lambda: steps(tmp_path) > 20)
        bed.cut(1)
        until(lambda: all("there is no connection to it" in said(tmp_path, worker) for worker in range(2)))
        bed.heal(1)
        before = steps(tmp_path)
        until(lambda: steps(tmp_path) > before + 20)
        (tmp_path / "leave").touch()
        (tmp_path / "stop").touch()
        assert [process.wait(SECONDS) for process in job] == [0, 0, 0], said(tmp_path, 0)
    for worker in range(2):
        taken, applied = (tmp_path / f"end.{worker}").read_text().split()
        assert taken == applied, "a push was lost, or counted twice"


def test_a_cable_that_stays_cut(tmp_path: Path) -> None:
    with Bed(hosts=2) as bed:
        job = start(bed, tmp_path)
        until(lambda: steps(tmp_path) > 20)
        bed.cut(1)
        assert [process.wait(SECONDS) for process in job] == [1, 1, 1], said(tmp_path, 2)
    for worker in range(2):
        assert "has been out of reach for" in said(tmp_path, worker)
    assert "no worker has been connected to this server for 12 s" in said(tmp_path, 2)
    assert not (tmp_path / "steps.2").exists()


def test_a_cable_that_is_cut_while_workers_say_goodbye(tmp_path: Path) -> None:
    with Bed(hosts=2) as bed:
        job = start(bed, tmp_path)
        until(lambda: steps(tmp_path) > 20)
        (tmp_path / "stop").touch()
        until(lambda: all((tmp_path / f"end.{worker}").exists() for worker in range(2)))
        bed.cut(1)
        (tmp_path / "leave").touch()
        time.sleep(3)  # how long it is cut, not how long something takes
        bed.heal(1)
        assert [process.wait(SECONDS) for process in job] == [0, 0, 0], said(tmp_path, 2)
