"""Servers and workers killed in mid-run: nothing answered is lost, nothing counts twice."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from distributedtorch.core.errors import CheckpointError
from distributedtorch.serve.board import Push
from distributedtorch.serve.journal import Journal, rounds
from distributedtorch.serve.parcel import Item
from distributedtorch.serve.shard import Brought, Shard
from distributedtorch.serve.terms import Terms
from tests.serve.killing import ROOT, killed


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("plan", "victims"),
    [
        ("server(staleness=4)", [0]),
        pytest.param("server(staleness=4)", [0, 2], marks=pytest.mark.long),
        pytest.param("server(apart,staleness=4)", [3], marks=pytest.mark.long),
        pytest.param("server(apart,staleness=0)", [1, 3, 0], marks=pytest.mark.long),
        pytest.param("server(staleness=0)", [1, 0], marks=pytest.mark.long),
    ],
)
def test_killed_in_mid_run(plan: str, victims: list[int], tmp_path: Path) -> None:
    assert killed(tmp_path, plan, victims, seed=1) == []
    if "apart" in plan:
        out = (tmp_path / "out").read_text()
        assert "dtorch: server 0 (process 3) failed first: was killed by SIGKILL" in out


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("forgets", "an answered push was lost"),
        pytest.param("twice", "were applied", marks=pytest.mark.long),
        pytest.param("apart forgets", "an answered push was lost", marks=pytest.mark.long),
    ],
)
def test_a_server_that_forgets_or_counts_twice_is_seen(how: str, said: str, tmp_path: Path) -> None:
    plan, victim = ("server(apart,staleness=4)", 3) if "apart" in how else ("server(staleness=4)", 0)
    found = killed(tmp_path, plan, [victim], seed=2, sabotage=how.removeprefix("apart "))
    assert any(said in fault for fault in found)


def pushed(values: list[float], step: int) -> Push:
    content = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
    return Push(worker=1, step=step, pulled=0, content=content)


def steps(path: Path) -> list[int]:
    return [push.step for one in rounds(path) for push in one.pushes]


def test_a_push_that_was_cut_off_is_not_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(7, {"version": 7})
    for step in range(3):
        journal.write([pushed([step, 2.5], step)], [{"lr": 0.1}])
    journal.close()
    path = tmp_path / "pushes.7"
    whole = path.read_bytes()
    assert steps(path) == [0, 1, 2]
    for size in range(len(whole) * 2 // 3, len(whole)):  # cut anywhere in the last one
        path.write_bytes(whole[:size])
        assert steps(path) == [0, 1]
    path.write_bytes(whole + struct.pack("<I", 0))
    assert steps(path) == [0, 1, 2]
    for place in range(0, len(whole), 7):  # but what was changed is no end
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((CheckpointError, ValueError)):
            assert steps(path) != [0, 1, 2]
            raise ValueError("cut off: not taken for whole")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kills", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_values_loaded_after_the_start(kills: str, tmp_path: Path) -> None:
    """Killed before the first push they are loaded again; after it the servers' count."""
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", "--restarts", "1"]
    command += [str(ROOT / "tests/serve/loading.py"), kills]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=80, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["7.0" if kills == "before" else "9.0"]
    assert ("servers go on from version 2" in ended.stderr) is (kills == "after")


def test_a_round_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(0, {})
    journal.write([pushed([1.0], 4), pushed([2.0], 5)], [])
    journal.close()
    path = tmp_path / "pushes.0"
    path.write_bytes(path.read_bytes()[:-20])
    assert steps(path) == []


def test_the_last_state_that_was_written_in_full_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.found() is None
    journal.begin(3, {"version": 3})
    journal.write([pushed([1.0], 9)], [])
    (tmp_path / "part").write_bytes(b"half a state")  # killed while the next was written
    (tmp_path / "pushes.4").touch()
    found = Journal(tmp_path).found()
    assert found is not None and found[0]["version"] == 3 and [one.pushes[0].step for one in found[1]] == [9]
    journal.begin(4, {"version": 4})
    assert {path.name for path in tmp_path.iterdir()} == {"state.4", "pushes.4"}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_pushes_applied_again_give_the_same_bits(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    def shard() -> Shard:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
        return Shard(params, kind(params, lr=0.1), [Item(param) for param in params], Terms(), 2)

    def grads(one: Shard, step: int) -> Brought:
        draw = torch.Generator().manual_seed(step)
        return Brought(values=[torch.randn(p.shape, generator=draw) for p in one.masters], options=[])

    first, journal = shard(), Journal(tmp_path)
    for step in range(10):
        if step == 4:
            journal.begin(4, {"shard": first.state()})
        push = Push(worker=0, step=step, pulled=step, content=grads(first, step))
        first.user.param_groups[0]["lr"] = 0.1 / (1 + step)  # as a scheduler does
        if step >= 4:
            journal.write([replace(push, content=first.written(push.content))], first.options())
        first.apply([push])
    journal.close()
    found = Journal(tmp_path).found()
    assert found is not None
    again = shard()
    again.take_state(found[0]["shard"])
    for one in found[1]:
        again.apply([replace(push, content=again.reread(push.content)) for push in one.pushes], one.options)
    assert all(torch.equal(a, b) for a, b in zip(again.masters, first.masters, strict=True))
