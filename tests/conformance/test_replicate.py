"""Replicas divided over groups of ranks (`replicate`): weights of one process, memory, traffic, checkpoints, faults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from distributedtorch.launch import record
from tests import forked
from tests.conformance.cases import BUCKET_BYTES
from tests.conformance.replicate_pool import LOOPS

POOL = "tests.conformance.replicate_pool"


def run(
    world: int, folder: Path, *checks: str, hosts: str = "", shared: bool = True
) -> subprocess.CompletedProcess[str]:
    environ = {"DISTRIBUTEDTORCH_BUCKET_BYTES": str(BUCKET_BYTES), "DISTRIBUTEDTORCH_SHARED": str(int(shared))}
    module = [*(["tests.hosts", hosts] if hosts else []), POOL, str(folder), *checks]
    return forked.run(world, *module, cwd=folder, timeout=100, environ=environ)


def passed(ended: subprocess.CompletedProcess[str]) -> bool:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return "replicas are as one process" in ended.stdout


@pytest.mark.timeout(200)
def test_four_ranks(tmp_path: Path) -> None:
    assert passed(run(1, tmp_path, "words"))
    checks = (
        "equal",
        "filled",
        "loops",
        "words",
        "precise",
        "costs",
        "resumed",
        "woken",
        "overlapped",
        "slow",
        "named",
    )
    ended = run(4, tmp_path, *checks)
    assert passed(ended)
    late = 'rank 2 has not come to "meeting"'
    assert late in ended.stderr and 'it waits in "slow gather" with ranks 2, 3' in ended.stderr
    assert "2 replicas of 2 ranks, shared memory inside, shared memory across" in ended.stderr
    assert "4 replicas of 1 rank, shared memory across" in ended.stderr
    rows = [json.loads(row) for row in (tmp_path / "loops.jsonl").read_text().splitlines()]
    assert {row["loop"] for row in rows} == set(LOOPS)
    assert not [row for row in rows if not row["difference"] <= 1e-9]


@pytest.mark.timeout(200)
def test_checkpoints_of_any_plan_and_world(tmp_path: Path) -> None:
    assert passed(run(4, tmp_path, "saved", "read"))
    assert passed(run(2, tmp_path, "saved", "read", "refused"))
    assert passed(run(1, tmp_path, "read"))
    assert len(list(tmp_path.glob("*replicate*.safetensors"))) == 6


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("world", "hosts", "said"),
    [
        (3, "", "3 replicas of 1 rank, shared memory across"),
        pytest.param(4, "0,0,1,1", "2 replicas of 2 ranks, shared memory inside, gloo across", marks=pytest.mark.long),
        pytest.param(
            *(4, "0,1,0,1", "2 replicas of 2 ranks, gloo inside, shared memory across"), marks=pytest.mark.long
        ),
        (4, "none", "2 replicas of 2 ranks, gloo inside, gloo across"),
    ],
)
def test_wherever_ranks_are(world: int, hosts: str, said: str, tmp_path: Path) -> None:
    checks = ("alike", "refused") if world == 3 else ("alike",)
    ended = run(world, tmp_path, *checks, hosts=hosts.removesuffix("none"), shared=hosts != "none")
    assert passed(ended)
    assert said in ended.stderr


@pytest.mark.timeout(100)
def test_groups_on_one_host_beside_groups_on_two(tmp_path: Path) -> None:
    assert passed(run(4, tmp_path, "channels", hosts="0,0,0,1"))


@pytest.mark.timeout(100)
def test_broken_builds_are_caught(tmp_path: Path) -> None:
    assert passed(run(4, tmp_path, "broken"))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("hosts", ["", pytest.param("0,0,1,1", marks=pytest.mark.long)])
def test_a_killed_rank_of_another_replica_is_named(hosts: str, tmp_path: Path) -> None:
    ended = run(4, tmp_path, "killed", hosts=hosts)
    assert ended.returncode != 0 and "rank 3" in ended.stderr and "SIGKILL" in ended.stderr
    folder = next(tmp_path.glob(".dtorch/*"))
    near = (0, 1, 2) if not hosts else (2,)  # on another host only the supervisor knows who was first
    ends = [record.read(folder, rank) for rank in near]
    assert all(end is not None and "rank 3 is gone" in end.message for end in ends), ends
