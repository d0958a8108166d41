"""Saving and loading: any plan and world to any other, bit for bit; one rank alone never hangs; failures reach all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import distributedtorch as dt
from distributedtorch.checkpoint import index, place
from distributedtorch.distribute import release
from tests import forked
from tests.checkpoint import job

ROOT = Path(__file__).parents[2]


def run(folder: Path, part: str, workers: int, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(workers)]
    command += [str(Path(job.__file__)), str(folder), part]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One process saves, then three ranks save and load, then two, then one process loads all."""
    folder = tmp_path_factory.mktemp("saving")
    (folder / "file").write_text("in the way")
    job.save(folder, "ddp", "one")
    said = run(folder, "three", 3).stderr + run(folder, "two", 2).stderr
    for name in ("ddp-2", "zero1-3", "zero2-2"):
        job.load(folder, "ddp", name)
    return folder, said


def gap(one: Path, other: Path) -> float:
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "under"),
    [
        ("one", "zero2-3"),
        ("one", "zero1-2"),
        ("zero1-3", "zero2-2"),
        ("zero1-3", "ddp-1"),
        ("zero2-2", "ddp-1"),
        ("ddp-2", "ddp-1"),
    ],
)
def test_any_plan_to_any_other(name: str, under: str, done: tuple[Path, str]) -> None:
    folder, _ = done
    assert gap(folder / f"{name}.saved", folder / f"{name}.loaded-{under}") == 0.0
    assert gap(folder / f"{name}.end", folder / f"{name}.end-{under}") <= 1e-12
    assert gap(folder / "one.end", folder / f"{name}.end") <= 1e-12
    assert gap(folder / f"{name}.saved", folder / f"{name}.end") > 1e-3


def test_everything_is_for_its_owner_only(done: tuple[Path, str]) -> None:
    folder, _ = done
    one = next((folder / "one").glob("*-step-*"))
    assert one.stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in one.iterdir()} == {0o600}
    assert not [entry.name for entry in folder.iterdir() if entry.name.startswith(".") and entry.name != ".dtorch"]


def test_tied_weights_are_stored_once(done: tuple[Path, str]) -> None:
    found = newest(done[0] / "one")
    assert "model.0/first.weight" in found.tensors and "model.0/tied.weight" not in found.tensors
    assert found.content["run"]["models"][0]["state"]["tied.weight"] == {"$tensor": "model.0/first.weight"}


def newest(folder: Path) -> index.Index:
    there = place.of(folder)
    return index.read(there, there.committed()[0])


def steps(folder: Path) -> int:
    return int(newest(folder).content["step"])


def test_one_rank_alone_is_written_when_all_can(done: tuple[Path, str]) -> None:
    folder, said = done
    assert steps(folder / "mid-ddp") == steps(folder / "mid-zero1") == 9
    assert steps(folder / "twice-zero1") == 9  # all ranks after step 8, and rank 0 once more
    assert steps(folder / "exit-joined") == steps(folder / "exit-later") == 8
    assert {file.split("-")[0] for file in newest(folder / "exit-model").files} == {"model"}
    line = "dt.save was called on rank 0, and the others have not come to it: all ranks carry it out after their next"
    assert said.count(line) == 5
    seconds = json.loads((folder / "said.0").read_text())
    assert seconds["ddp"] < 5 and seconds["zero1"] < 5


def test_what_fails_on_one_rank_is_raised_on_all(done: tuple[Path, str]) -> None:
    folder, _ = done
    mine, other = (json.loads((folder / f"said.{rank}").read_text()) for rank in (0, 1))
    whats = ("under a file", "disk", "a set", "a set saved", "own", "nothing there", "one rank's own path")
    for what in (*whats, "another model"):
        assert mine[what] == other[what] or what == "one rank's own path"
        assert "needed: " in mine[what] and "do: " in mine[what]
    assert "Not a directory" in mine["under a file"] or "File exists" in mine["under a file"]
    assert "File too large" in mine["disk"]
    assert "state odd 0 of parameter 'tied.bias' is a set, and the plan divides that state" in mine["a set"]
    assert re.match(r"odd\.0 in the state of optimizer\.0/model\.0/\S+ is a set", mine["a set saved"])
    assert "on rank 1: load_state_dict of state={'own': a Own} has raised ValueError: not here" in mine["own"]
    assert (
        re.search(r"nothing was heard of rank 1 for \d s", mine["no store"])
        and mine["no store"]
        and other["no store"] == "out of reach"
    )
    assert mine["slow disk"] == other["slow disk"] == ""
    assert "holds no checkpoint" in mine["nothing there"]
    assert re.search(r"path '\S+kept' here and '\S+nothing' on rank 1", mine["one rank's own path"])
    assert re.search(r"path '\S+nothing' here and '\S+kept' on rank 0", other["one rank's own path"])
    assert "first.weight (saved (16, 6) float64, here (17, 6) float64)" in mine["another model"]
    assert mine["steps"] == "16"
    assert steps(folder / "kept") == 8


def test_optimizer_state_of_one_rank_ends_in_words(tmp_path: Path) -> None:
    began = time.monotonic()
    said = run(tmp_path, "state of one rank", 2, code=1).stderr
    assert time.monotonic() - began < 30
    line = r'rank 0 waits in "optimizer state.* at \S*job\.py:\d+ in state_of_one_rank\(\), while rank 1 waits in '
    assert re.search(line + r"\S+.* at \S*job\.py:\d+ in ", said)


@pytest.fixture
def training():
    yield job.Training("ddp")
    release()


def test_a_part(training: job.Training, tmp_path: Path) -> None:
    dt.save(tmp_path / "part", model=training.model)
    assert set(newest(tmp_path / "part").files) == {"model-00000.safetensors"}
    training.epoch()
    dt.load(tmp_path / "part", model=training.model)
    assert training.optimizer.state_dict()["state"]
    with pytest.raises(dt.CheckpointError, match="not distributed"):
        dt.save(tmp_path / "part", model=job.Net())


def test_nothing_is_changed_by_a_refused_load(training: job.Training, tmp_path: Path) -> None:
    training.epoch()
    dt.save(tmp_path / "c")
    release()
    other = job.Training("ddp", width=17)
    other.keep(tmp_path / "before")
    with pytest.raises(dt.CheckpointError, match="is not the one that was saved"):
        dt.load(tmp_path / "c")
    other.keep(tmp_path / "after")
    assert gap(tmp_path / "before", tmp_path / "after") == 0.0


def forge(folder: Path, change) -> None:
    """Change the newest checkpoint.json's content and give it a right hash."""
    file = folder / place.of(folder).committed()[0] / "checkpoint.json"
    content = json.loads(file.read_text())["checkpoint"]
    change(content)
    file.write_bytes(index.text(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(step="x"),
        lambda c: c["run"]["order"].update(torch="A"),
        lambda c: c["run"]["order"].update(numpy={}),
        lambda c: c["run"]["optimizers"][0]["groups"][0]["options"].update(lr={"$float": []}),
        lambda c: c["run"]["schedulers"][0].update(state={"$dict": [[1]]}),
        lambda c: c["run"]["user"].update(own={"$tuple": 5}),
    ],
)
def test_forms_are_understood_before_anything_is_changed(change, training: job.Training, tmp_path: Path) -> None:
    dt.save(tmp_path / "c")
    forge(tmp_path / "c", change)
    training.epoch()
    training.keep(tmp_path / "before")
    with pytest.raises(dt.CheckpointError):
        dt.load(tmp_path / "c")
    training.keep(tmp_path / "after")
    assert gap(tmp_path / "before", tmp_path / "after") == 0.0


def test_what_cannot_be_taken_over_is_said(tmp_path: Path) -> None:
    """A scheduler of the user's own class is the only one who knows what it takes back."""

    class Stubborn(torch.optim.lr_scheduler.ExponentialLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("nothing pleases me")

    model = job.Net()
    optimizer = torch.optim.SGD(model.parameters())
    dt.distribute(model, optimizer, Stubborn(optimizer, 0.9))
    dt.save(tmp_path / "c")
    with pytest.raises(dt.CheckpointError, match=r"cannot be taken over \(KeyError") as refused:
        dt.load(tmp_path / "c")
    assert "partly changed" in str(refused.value) and "do: " in str(refused.value)
    release()


def test_state_that_is_not_plain_is_refused(training: job.Training, tmp_path: Path) -> None:
    training.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(dt.CheckpointError, match=r"note in the state of optimizer\.0/groups/0"):
        dt.save(tmp_path / "c")
    assert not place.of(tmp_path / "c").committed()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_go_by_name_whatever_the_order_of_their_groups(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, "tests.checkpoint.orders_pool", str(tmp_path), cwd=tmp_path, timeout=90)
    assert ended.returncode == 0, ended.stderr
    for rank in range(world):
        said = json.loads((tmp_path / str(rank)).read_text())
        assert all("another order" in said.pop(f"refused {older}") for older in (False, True) if world > 1)
        assert len(said) == (3 if world == 1 else 12) and set(said.values()) == {0.0}, said


def test_groups_of_other_parameters_are_refused(tmp_path: Path) -> None:
    for moved in (False, True):
        first, last = nn.Linear(2, 2), nn.Linear(2, 2)
        one, two = (last.weight, last.bias) if moved else (last.bias, last.weight)
        adam = torch.optim.AdamW([{"params": [first.bias, one]}, {"params": [first.weight, two]}])
        dt.distribute(nn.Sequential(first, last), adam)
        if moved:
            with pytest.raises(dt.CheckpointError, match=r"'model\.0/1\.bias' is in group 0 .*\n.*as here: group 1"):
                dt.load(tmp_path / "c")
        else:
            dt.save(tmp_path / "c")
        release()


def test_before_distribute(tmp_path: Path) -> None:
    with pytest.raises(dt.CheckpointError, match=r"before dt\.distribute"):
        dt.save(tmp_path / "c")
