"""The folder: whole or not there, whatever moment its writer dies; not one bit changed without notice."""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from distributedtorch import CheckpointError
from distributedtorch.checkpoint import folder
from distributedtorch.checkpoint.plain import Packer, unpack


def write(path: Path, value: float, size: int = 40) -> None:
    tensors = {f"{kind}.0.safetensors": {"a": torch.full((size,), value)} for kind in ("model", "optimizer")}
    folder.write(path, {"value": value}, tensors)


def value_of(path: Path) -> float:
    """The one value all of it was written with."""
    run, tensors, _ = folder.read(path)
    assert all((part["a"] == run["value"]).all() for part in tensors.values())
    assert len(tensors) == 2
    return run["value"]


class Killed(BaseException):
    """Stands for kill -9: from here on no system call of the writer has any effect."""


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "chmod")


@pytest.mark.parametrize("left", ["nothing", "old", "aside", "both"])
def test_killed_before_any_of_its_system_calls(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, points = tmp_path / "c", 0
    while True:
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry)
        if left != "nothing":
            write(path, 1.0)
        if left in ("aside", "both"):
            path.rename(tmp_path / ".c.aside")
        if left == "both":
            write(tmp_path / "new", 1.0)
            (tmp_path / "new").rename(path)
        calls = 0

        def counted(real, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > points:  # noqa: B023
                raise Killed
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in CALLS:
                real = getattr(os, name)
                patch.setattr(os, name, lambda *a, real=real, **k: counted(real, *a, **k))
            try:
                write(path, 2.0)
                break
            except Killed:
                points += 1
        if left == "nothing" and not path.exists():
            continue
        assert value_of(path) in (1.0, 2.0)
        write(path, 3.0)  # and the next writer is not disturbed by what is left
        assert value_of(path) == 3.0
    assert points >= 15


WRITERS = """
import os, signal, sys, torch
from pathlib import Path
from distributedtorch.checkpoint import folder
torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for path in sys.stdin:
    child = os.fork()
    if child:
        continue
    number = 0
    while True:
        number += 1
        part = {"a": torch.full((50_000,), float(number))}
        tensors = {"model.0.safetensors": part, "optimizer.0.safetensors": part}
        folder.write(Path(path.strip()), {"value": number}, tensors)
        print(os.getpid(), number, flush=True)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Torch is imported once; each writer is a child of that process, killed while it saves again and again."""
    draw, path = random.Random(0), tmp_path / "c"
    command = [sys.executable, "-c", WRITERS]
    writers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert writers.stdin is not None and writers.stdout is not None
    for _ in range(30):
        writers.stdin.write(f"{path}\n".encode())
        pid, seen = map(int, writers.stdout.readline().split())
        time.sleep(draw.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        while select.select([writers.stdout], [], [], 0)[0]:
            seen = int(writers.stdout.readline().split()[1])
        assert value_of(path) in (seen, seen + 1)
        write(path, -1.0)
        assert value_of(path) == -1.0
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    writers.kill()
    writers.wait()


def test_every_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "c", 1.0, 3)
    tried = 0
    for file in sorted((tmp_path / "c").iterdir()):
        whole = file.read_bytes()
        for place in range(len(whole)):
            for bit in range(8):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << bit
                file.write_bytes(flipped)
                with pytest.raises(CheckpointError, match="do: "):
                    folder.read(tmp_path / "c")
                tried += 1
        file.write_bytes(whole)
    assert tried > 4000
    assert value_of(tmp_path / "c") == 1.0
    file = tmp_path / "c" / "model.0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"model\.0\.safetensors has changed"):
        folder.read(tmp_path / "c")
    monkeypatch.setattr(folder, "check_hash", lambda *_: "")
    folder.read(tmp_path / "c")  # without the hash nothing would have been noticed


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda c: (shutil.rmtree(c), c.write_text("x")), "is a file"),
        (lambda c: (c / "run.json").unlink(), "has no run.json"),
        (lambda c: (c / "run.json").write_text("[1, 2]"), "holds something else"),
        (lambda c: (c / "run.json").write_bytes(b""), "holds something else"),
        (lambda c: (c / "model.0.safetensors").unlink(), "No such file"),
        (lambda c: os.truncate(c / "model.0.safetensors", 100), "has 100 bytes"),
        (lambda c: (c / "model.0.safetensors").write_bytes((c / "run.json").read_bytes()), "were written"),
        (lambda c: ((c / "x").write_text(""), (c / "run.json").unlink(), (c / "run.json").symlink_to(c / "x")), "read"),
    ],
)
def test_what_is_no_checkpoint(damage, words: str, tmp_path: Path) -> None:
    write(tmp_path / "c", 1.0)
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match="do: ") as refused:
        folder.read(tmp_path / "c")
    assert words in str(refused.value)


def test_files_outside_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "c", 1.0)
    (tmp_path / "c" / "run.json").unlink()
    card = {"bytes": 1, "sha256": ""}
    folder._write_run(tmp_path / "c" / "run.json", {"format": 1, "files": {"../secret.safetensors": card}})
    with pytest.raises(CheckpointError, match="file name"):
        folder.read(tmp_path / "c")


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "c", 1.0)
    (tmp_path / "c" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match=r"did not write \(thesis.txt\)"):
        write(tmp_path / "c", 2.0)
    assert value_of(tmp_path / "c") == 1.0
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "file", 2.0)


def test_a_failed_write_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "c", 1.0)
    for step in ("save_file", "_write_run", "_flush"):
        with monkeypatch.context() as patch:
            patch.setattr(folder, step, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            with pytest.raises(OSError, match="No space left"):
                write(tmp_path / "c", 2.0)
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
        assert value_of(tmp_path / "c") == 1.0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(CheckpointError, match="needs 320 bytes and 5 are free"):
        write(tmp_path / "c", 2.0)


def test_plain_data_comes_back_as_it_was() -> None:
    tie, flat = torch.randn(3, 2), torch.arange(10.0)
    state = {
        "a": tie,
        "b": {"c": tie, 0: (1, 2.5, None), 1: [True, "x"]},
        "views": [flat[:6], flat[3:], flat[::2], torch.empty(0), torch.tensor(1)],
        "milestones": Counter({4: 1, 12: 2}),
        "odd": {"$tensor": "a", "inf": float("inf"), "low": -float("inf")},
        "types": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), torch.ones(2).long()],
    }
    packer = Packer("a test")
    plain = packer.pack(state)
    back = unpack(plain, packer.tensors)
    assert back["b"]["c"] is back["a"] and "b.c" not in packer.tensors
    assert back["b"][0] == (1, 2.5, None) and back["b"][1] == [True, "x"]
    assert type(back["milestones"]) is Counter and back["milestones"] == state["milestones"]
    assert back["odd"] == state["odd"]
    for word in ("views", "types"):
        for one, other in zip(state[word], back[word], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
