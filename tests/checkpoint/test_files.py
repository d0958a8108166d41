"""The files: whole or not there, whatever moment their writer dies; not one bit changed without notice."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
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
from safetensors import safe_open

from distributedtorch import CheckpointError
from distributedtorch.checkpoint import blocks, index, place
from distributedtorch.checkpoint.index import Reader
from distributedtorch.checkpoint.plain import Packer, unpack
from tests.checkpoint.files import newest, value_in, write


class Killed(BaseException):
    """Stands for kill -9: from here on no system call of the writer has any effect."""


CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir", "truncate", "pwrite", "chmod")


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
def test_killed_before_any_of_its_system_calls(earlier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, points = tmp_path / "c", 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        place._locks.clear()
        for value in range(earlier):
            write(root, 1.0 + value)
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
                write(root, 7.0)
                break
            except Killed:
                points += 1
        place._locks.clear()  # the dead hold none
        assert newest(root) in ((float(earlier) or None), 7.0)
        write(root, 8.0)  # and the next writer is not disturbed by what is left
        assert newest(root) == 8.0
        left = [entry.name for entry in root.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]
        assert left == []
        assert len(place.of(root).committed()) <= 2
    assert points >= 15


WRITERS = """
import os, signal, sys, torch
from tests.checkpoint.files import write
torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for path in sys.stdin:
    child = os.fork()
    if child:
        continue
    number = 0
    while True:
        number += 1
        write(path.strip(), float(number), 50_000)
        os.write(1, f"{os.getpid()} {number}\\n".encode())  # in one piece: a kill may come at any moment
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Torch is imported once; each writer is a child of that process, killed while it saves again and again."""
    draw, root = random.Random(0), tmp_path / "c"
    command = [sys.executable, "-c", WRITERS]
    writers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert writers.stdin is not None and writers.stdout is not None
    for _ in range(30):
        writers.stdin.write(f"{root}\n".encode())
        pid, seen = map(int, writers.stdout.readline().split())
        time.sleep(draw.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        while select.select([writers.stdout], [], [], 0)[0]:
            seen = int(writers.stdout.readline().split()[1])
        assert newest(root) in (seen, seen + 1)
    writers.kill()
    writers.wait()
    write(root, -1.0)
    assert newest(root) == -1.0


def test_every_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(tmp_path, 1.0, 3)
    tried = 0
    for file in sorted((tmp_path / name).iterdir()):
        whole = file.read_bytes()
        for at in range(len(whole)):
            for bit in range(8):
                flipped = bytearray(whole)
                flipped[at] ^= 1 << bit
                file.write_bytes(flipped)
                with pytest.raises(CheckpointError, match="do: "):
                    value_in(tmp_path, name)
                tried += 1
        file.write_bytes(whole)
    assert tried > 4000
    assert value_in(tmp_path, name) == 1.0
    file = tmp_path / name / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors has changed"):
        value_in(tmp_path, name)
    monkeypatch.setattr(blocks.hashlib, "sha256", lambda _: type("Same", (), {"hexdigest": lambda _: "0" * 64})())
    found = index.Card(bytes=file.stat().st_size, blocks=("0" * 64,))
    blocks.Blocks("x", found, *place.of(tmp_path).opened(name, file.name), blocks.Kept()).block(
        0
    )  # the hash is what notices it


def test_blocks_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64)
    tensors = [
        ("a", torch.arange(100)),
        ("b", torch.randn(7, 3).bfloat16()),
        ("c", torch.tensor(2.5)),
        ("d", torch.ones(0)),
    ]
    with (tmp_path / "x.safetensors").open("wb") as file:
        card = blocks.write(file.write, tensors).card()
    with safe_open(tmp_path / "x.safetensors", "pt") as whole:  # the layout is the known one
        assert all(torch.equal(whole.get_tensor(name), tensor) for name, tensor in tensors)
    seen: list[int] = []
    content = (tmp_path / "x.safetensors").read_bytes()

    def read(offset: int, out: memoryview) -> int:
        seen.append(offset // 64)
        out[:] = content[offset : offset + len(out)]
        return len(out)

    opened = blocks.Blocks("x", card, len(content), read, blocks.Kept())
    _, _, first = opened.header()["a"]
    out = torch.empty(10, dtype=torch.int64)
    seen.clear()
    opened.read(first + 50 * 8, blocks.memory_of(out))
    assert out.tolist() == list(range(50, 60))
    assert seen == list(range((first + 400) // 64, (first + 479) // 64 + 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: (c / "checkpoint.json").unlink(), "cannot be read"),
        (lambda c: (c / "checkpoint.json").write_text("[1, 2]"), "is not what dt.save writes"),
        (lambda c: (c / "checkpoint.json").write_bytes(b""), "is not what dt.save writes"),
        (lambda c: (c / "model-00000.safetensors").unlink(), "is missing"),
        (lambda c: os.truncate(c / "model-00000.safetensors", 100), "has 100 bytes"),
        (lambda c: shutil.copy(c / "model-00000.safetensors", c / "model-00001.safetensors"), "does not belong"),
        (
            lambda c: (c / "state-00000.safetensors").write_bytes((c / "model-00000.safetensors").read_bytes()),
            "were writ",
        ),
        (
            lambda c: (
                (c / "x").touch(),
                (c / "checkpoint.json").unlink(),
                (c / "checkpoint.json").symlink_to(c / "x"),
            ),
            "read",
        ),
        (lambda c: ((c / "checkpoint.json").unlink(), os.mkfifo(c / "checkpoint.json")), "not a plain file"),
    ],
)
def test_what_is_no_checkpoint(damage, words: str, tmp_path: Path) -> None:
    name = write(tmp_path, 1.0)
    damage(tmp_path / name)
    with pytest.raises(CheckpointError, match="do: ") as refused:
        value_in(tmp_path, name)
    assert words in str(refused.value)


def forge(root: Path, name: str, change) -> None:
    """Rewrite checkpoint.json with a right hash and another content: what an attacker would do."""
    file = root / name / "checkpoint.json"
    content = json.loads(file.read_text())["checkpoint"]
    change(content)
    file.write_bytes(index.text(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["files"].update({"../secret.safetensors": {"bytes": 1, "blocks": ["x"]}}),
        lambda c: c["files"].update({"model-00009.safetensors": {"bytes": 1 << 62, "blocks": []}}),
        lambda c: c["tensors"]["model.0/a"].update(shape=[1 << 62, 1 << 62]),
        lambda c: c["tensors"]["model.0/a"].update(shape=[-1, -40]),
        lambda c: c["tensors"]["model.0/a"].update(shape=[20]),
        lambda c: c["tensors"]["model.0/a"].update(stride=[7]),
        lambda c: c["tensors"]["model.0/a"].update(dtype="F64"),
        lambda c: c["tensors"]["model.0/a"].update(parts=[["model-00000.safetensors", "b", 0, 40]]),
        lambda c: c["tensors"]["model.0/a"]["parts"].append(["model-00000.safetensors", "model.0/a", 0, 40]),
        lambda c: c["tensors"]["model.0/a"].update(shape=[0, 1 << 63], parts=[["model-00000.safetensors", "x", 0, 0]]),
        lambda c: c["tensors"]["model.0/a"].update(shape=[40, 1], stride=[1, "1"]),
        lambda c: c["tensors"]["model.0/a"].update(shape=[40, 1], stride=[1, 1 << 63]),
        lambda c: c["tensors"]["model.0/a"].update(stride=[1.0]),
        lambda c: c["tensors"]["model.0/a"].update(parts=[["model-00000.safetensors", "model.0/a", 0.0, 40]]),
        lambda c: c["tensors"]["model.0/a"].update(parts=[["model-00000.safetensors", ["model.0/a"], 0, 40]]),
        lambda c: c["tensors"].update(b=c["tensors"]["model.0/a"]),
        lambda c: c["tensors"]["model.0/a"].update(  # 40 elements stored, 40,000 said
            shape=[40_000], parts=[["model-00000.safetensors", "model.0/a", 40 * k, 40 * k + 40] for k in range(1000)]
        ),
        lambda c: c["run"].update(a={"$tensor": "nowhere"}),
        lambda c: c.pop("tensors"),
        lambda c: c.update(format="1"),
    ],
)
def test_what_contradicts_itself_is_refused(change, tmp_path: Path) -> None:
    name = write(tmp_path, 1.0)
    forge(tmp_path, name, change)
    with pytest.raises(CheckpointError, match="do: "):
        value_in(tmp_path, name)


def test_a_file_unfolds_to_no_more_than_it_holds() -> None:
    said = {f"t{k}": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]} for k in range(50)}
    text = json.dumps(said).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(100)
    card = blocks.Card(bytes=len(content), blocks=(blocks.hashlib.sha256(content).hexdigest(),))

    def read(offset: int, out: memoryview) -> int:
        out[:] = content[offset : offset + len(out)]
        return len(out)

    with pytest.raises(CheckpointError, match="is said to hold 5,000 bytes"):
        blocks.Blocks("x", card, len(content), read, blocks.Kept()).header()


def test_what_was_read_is_not_kept_open(tmp_path: Path) -> None:
    """A file that is removed while open keeps its place on the disk."""
    name = write(tmp_path, 1.0)
    gc.collect()
    gc.disable()
    try:
        value_in(tmp_path, name)
        opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    finally:
        gc.enable()
    assert not [path for path in opened if path.startswith(str(tmp_path / name))]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    name = write(tmp_path, 1.0)
    forge(tmp_path, name, lambda c: c.update(format=2, versions={"distributedtorch": "9.9"}))
    with pytest.raises(index.NewerError, match=r"format 2, written by .*9\.9"):
        value_in(tmp_path, name)
    forge(tmp_path, name, lambda c: c.update(format=1, something="more"))
    assert value_in(tmp_path, name) == 1.0  # what is only added is left alone


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    (tmp_path / ".draft-mine").mkdir()
    (tmp_path / "000009-step-1").mkdir()
    (tmp_path / "000009-step-1" / "notes.txt").write_text("not ours")
    (tmp_path / "000008-step-1").write_text("a file")
    for value in (1.0, 2.0, 3.0):
        write(tmp_path, value)
    assert (tmp_path / "000008-step-1").exists() and not (tmp_path / "000010-step-1").exists()
    assert (tmp_path / "thesis.txt").exists() and (tmp_path / ".draft-mine").exists()
    assert (tmp_path / "000009-step-1" / "notes.txt").exists()
    assert newest(tmp_path) == 3.0
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"is a file|Not a directory|File exists"):
        write(tmp_path / "file", 2.0)


def test_a_failed_write_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1.0)
    for call in ("write", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            with pytest.raises(CheckpointError, match="No space left"):
                write(tmp_path, 2.0)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "000001-step-1"]
        assert newest(tmp_path) == 1.0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(CheckpointError, match="needs 320 bytes and 5 are free"):
        write(tmp_path, 2.0)


def _hold(root: Path, ready, done) -> None:
    write(root, 1.0)
    ready.set()
    done.wait(30)


def test_two_jobs_on_one_path(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(30)
    with pytest.raises(CheckpointError, match=f'is being written by another job .*"pid": {other.pid}'):
        write(tmp_path, 2.0)
    other.kill()
    other.join()
    write(tmp_path, 2.0)  # the dead hold nothing
    assert newest(tmp_path) == 2.0


def test_order_is_that_of_writing(tmp_path: Path) -> None:
    """A run that went back and took another way: its checkpoints are the newer ones, whatever their step."""
    write(tmp_path, 300.0)
    write(tmp_path, 100.0)
    assert newest(tmp_path) == 100.0
    assert place.of(tmp_path).committed() == ["000002-step-100", "000001-step-300"]


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        name = write(tmp_path, 1.0)
    finally:
        os.umask(before)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in (tmp_path / name).iterdir()} == {0o600}


def test_a_store_that_cannot_rename() -> None:
    root = "memory://tests/store"
    for value in (1.0, 2.0, 3.0):
        write(root, value)
    there = place.of(root)
    assert newest(root) == 3.0 and len(there.committed()) == 2
    there.store.rm_file(f"{there.root}/{there.committed()[0]}/checkpoint.json")  # as a writer that died leaves it
    assert newest(root) == 2.0
    write(root, 4.0)
    assert newest(root) == 4.0


def test_reading_in_another_order_of_memory(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    there, name = place.of(tmp_path), place.of(tmp_path).committed()[0]
    reader = Reader(there, name, index.read(there, name))
    image = torch.arange(24.0).view(2, 3, 2, 2)
    reader.index.tensors["i"] = index.Entry(shape=(2, 3, 2, 2), dtype=torch.float32, stride=None, parts=())
    reader.read = lambda key, low, high: image.reshape(-1)[low:high].clone()  # type: ignore[method-assign]
    last = image.to(memory_format=torch.channels_last)
    assert torch.equal(reader.ordered("i", last.stride(), 5, 17), last.as_strided((24,), (1,))[5:17])
    assert torch.equal(reader.ordered("i", image.stride(), 5, 17), image.reshape(-1)[5:17])


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
