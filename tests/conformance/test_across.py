"""Codes between hosts only: equal to the algorithm written out, however ranks lie on hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributedtorch.core.plan import Plan
from tests import forked

POOL = "tests.conformance.across_pool"
IN_PIECES = {"DISTRIBUTEDTORCH_BUCKET_BYTES": "8192"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "hosts", ["0,1,1", *(pytest.param(more, marks=pytest.mark.long) for more in ("0,0,1,1", "0,1,0,1", "0,0,0,1"))]
)
def test_across_hosts(hosts: str, tmp_path: Path) -> None:
    ended = forked.run(len(hosts.split(",")), "tests.hosts", hosts, POOL, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "across hosts as written out" in ended.stdout
    assert "wire dense inside 2 hosts, codes across" in ended.stderr


@pytest.mark.timeout(120)
def test_across_hosts_in_pieces_and_as_what_is_large(tmp_path: Path) -> None:
    ended = forked.run(4, "tests.hosts", "0,0,1,1", POOL, str(tmp_path), "large", environ=IN_PIECES)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(120)
def test_hosts_that_forget_what_they_left_out_are_seen(tmp_path: Path) -> None:
    ended = forked.run(4, "tests.hosts", "0,0,1,1", POOL, str(tmp_path), "forget")
    assert ended.returncode != 0 and "from the algorithm written out" in ended.stderr


@pytest.mark.timeout(120)
def test_one_host_is_dense_and_says_so(tmp_path: Path) -> None:
    ended = forked.run(2, POOL, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "wire dense: all ranks are on one host" in ended.stderr


@pytest.mark.timeout(120)
def test_without_shared_memory_all_ranks_exchange_codes(tmp_path: Path) -> None:
    ended = forked.run(2, POOL, str(tmp_path), environ={"DISTRIBUTEDTORCH_SHARED": "0"})
    assert ended.returncode != 0 and "other numbers on one host" in ended.stderr
    assert "wire codes between all ranks (switched off by DISTRIBUTEDTORCH_SHARED=0)" in ended.stderr


def test_plans_that_divide_are_refused() -> None:
    assert str(Plan.parse("wire=topk(ratio=0.1,across=hosts)")) == "wire=topk(0.1,hosts)"
    assert not Plan.parse("diloco(every=2,drift=0.1),wire=topk(0.1,hosts)").faults()
    for sync in ("zero1", "zero2"):
        (fault,) = Plan.parse(f"{sync},wire=topk(0.1,hosts)").faults()
        assert "ranks that own whole tensors" in fault and "write `wire=topk(0.1)`" in fault
    assert Plan.parse("wire=topk(0.1,nodes)").faults() and Plan.parse("wire=randomk(0.1,hosts)").faults()
