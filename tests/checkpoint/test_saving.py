"""Saving and loading: any plan and world to any other, bit for bit; damage is found; one rank alone never hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributedtorch import CheckpointError
from distributedtorch.checkpoint import simple as files

JOB = Path(__file__).with_name("job.py")


def job(folder: Path, what: str, plan: str, world: int, *, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOB), str(folder), what, plan]
    if world > 1:
        command[1:1] = ["-m", "distributedtorch", "run", "--workers", str(world)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert code is None or ended.returncode == code, ended.stdout + ended.stderr
    return ended


def equal(one: Path, other: Path, bound: float = 0.0) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(float((a[k] - b[k]).abs().max()) <= bound for k in a)


@pytest.mark.parametrize(
    ("first", "second"), [(("zero1", 3), ("zero2", 2)), (("ddp", 1), ("zero1", 2)), (("zero2", 2), ("ddp", 1))]
)
def test_any_plan_to_any_other(first: tuple[str, int], second: tuple[str, int], tmp_path: Path) -> None:
    job(tmp_path, "save", *first)
    (tmp_path / "end.safetensors").rename(tmp_path / "uninterrupted.safetensors")
    assert (tmp_path / "ckpt").stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "ckpt").iterdir()} == {0o600}
    job(tmp_path, "load", *second)
    assert equal(tmp_path / "saved.safetensors", tmp_path / "loaded.safetensors")
    assert equal(tmp_path / "uninterrupted.safetensors", tmp_path / "end.safetensors", 1e-12)


@pytest.mark.parametrize("plan", ["ddp", "zero1"])
def test_from_one_rank_only(plan: str, tmp_path: Path) -> None:
    said = job(tmp_path, "one rank", plan, 2).stdout
    _, card = files.read(tmp_path / "ckpt")
    assert card["steps"] == (8 if plan == "ddp" else 9)
    assert ("on rank 0 only" in said) == (plan != "ddp")


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = job(tmp_path, "bad path", "zero1", 2).stdout
    assert "was not saved" in said and "do:" in said and "went on" in said
    assert not list(tmp_path.glob("*.writing"))


def test_state_dict_of_one_rank_ends_in_words(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = job(tmp_path, "state of one rank", "zero1", 2, code=None)
    assert ended.returncode != 0 and time.monotonic() - began < 25
    for fragment in ("optimizer state", "rank 0", "rank 1", "job.py:"):
        assert fragment in ended.stderr


def sample(value: float) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.full((100, 100), value)
    return {"model.0": {"a": weight, "tied": weight, "b": torch.arange(7)}}


def test_round_trip_keeps_ties(tmp_path: Path) -> None:
    files.write(tmp_path / "c", sample(1.5), {"x": 1})
    tensors, card = files.read(tmp_path / "c")
    assert card["x"] == 1 and card["same as"]["model.0"] == {"tied": "a"}
    assert torch.equal(tensors["model.0"]["tied"], sample(1.5)["model.0"]["a"])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / "c", sample(1.5), {})
    damage(tmp_path / "c" / "model.0.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.0\.safetensors has changed"):
        files.read(tmp_path / "c")

    class Blind:
        def hexdigest(self) -> str:
            return json.loads((tmp_path / "c" / "run.json").read_text())["sha256"]["model.0"]

    monkeypatch.setattr(files.hashlib, "sha256", lambda data: Blind())
    files.read(tmp_path / "c")  # without the hash nothing would have been noticed


@pytest.mark.parametrize("what", ["missing", "a file", "truncated", "foreign", "newer"])
def test_what_is_no_checkpoint(what: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if what == "a file":
        path.write_text("x")
    elif what != "missing":
        files.write(path, sample(1.0), {})
        card = path / "run.json"
        text = {"truncated": card.read_text()[:40], "foreign": "[1, 2]", "newer": '{"version": 9}'}[what]
        card.write_text(text)
    with pytest.raises(CheckpointError, match="do:"):
        files.read(path)


WRITER = """
import sys, torch
from pathlib import Path
from distributedtorch.checkpoint import simple as folder
k = 0
while True:
    k += 1
    folder.write(Path(sys.argv[1]), {"model.0": {"a": torch.full((300, 300), float(k))}}, {"k": k})
    print(k, flush=True)
"""


@pytest.mark.timeout(90)
def test_killed_while_writing_leaves_old_or_new(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(draw.randint(2, 20))][-1]
        time.sleep(draw.random() * 0.01)
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.communicate()[0].split()
        seen = int(rest[-1]) if rest else seen
        tensors, card = files.read(tmp_path / "c")
        assert card["k"] in (seen, seen + 1)
        assert float(tensors["model.0"]["a"][0, 0]) == card["k"]
