"""zero3 with a wire: equal to the algorithm written out, in shared memory, without it, and on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

POOL = "tests.conformance.encoded_pool"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_divided_parameters_travel_as_codes(world: int, tmp_path: Path) -> None:
    environ = {"DISTRIBUTEDTORCH_SHARED": "0"} if world == 3 else {}
    hosts = ("tests.hosts", "0,0,1,1") if world == 4 else ()
    ended = forked.run(world, *hosts, POOL, str(tmp_path), environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert "encoded as written out" in ended.stdout
