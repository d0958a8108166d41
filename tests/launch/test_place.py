"""The environment read, and refused in words where it contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch.place import Place, find

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_no_variables_is_one_process():
    assert find({}) == Place(rank=0, world=1, local_rank=0, local_world=1, launcher="none", run_folder=None)


def test_torchrun_and_dtorch_are_told_apart_by_the_run_folder():
    assert find(TORCHRUN) == Place(rank=3, world=4, local_rank=1, local_world=2, launcher="torchrun", run_folder=None)
    ours = find(TORCHRUN | {"DISTRIBUTEDTORCH_RUN": "/run"})
    assert (ours.launcher, ours.run_folder) == ("dtorch", Path("/run"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": "4"}, "RANK is 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "0"}, "RANK is 3"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_a_contradiction_is_refused(change, words):
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match="do: ") as refused:
        find(environ)
    assert words in str(refused.value)
