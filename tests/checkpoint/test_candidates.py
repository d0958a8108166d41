"""What is a checkpoint and what is only called like one: on disks, in stores, behind links; all who look agree."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import distributedtorch as dt
from distributedtorch import CheckpointError
from distributedtorch.checkpoint import place
from distributedtorch.cli import main
from distributedtorch.distribute import release
from tests.checkpoint import job
from tests.checkpoint.files import newest, value_in, write


@pytest.fixture
def training() -> Iterator[job.Training]:
    yield job.Training("ddp")
    release()


@pytest.fixture(params=["disk", pytest.param("file://", marks=pytest.mark.long), "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder for checkpoints, which does not exist yet."""
    if request.param == "memory://":
        return f"memory://candidates/{uuid.uuid4().hex}"
    return str(tmp_path / "runs") if request.param == "disk" else f"file://{tmp_path}/runs"


def put(root: str, name: str, content: bytes = b"x") -> None:
    """A file in a folder of checkpoints, whatever it is."""
    there = place.of(root)
    if isinstance(there, place.Local):
        path = there.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return
    there.store.makedirs(f"{there.root}/{name}".rpartition("/")[0], exist_ok=True)
    there.store.pipe_file(f"{there.root}/{name}", content)


LEFT: dict[str, tuple[str, ...]] = {
    "a first save cut off": ("000001-step-8/model-00000.safetensors",),
    "what NFS keeps of an open file": ("000001-step-8/.nfs00000000a1b2c3d400000001",),
    "a note of the user's": ("000001-step-8",),
    "a folder of the user's": ("000003-step-8/notes.txt", "000001-step-8/model-00000.safetensors"),
    "a note with the last number": ("999999999999-step-1",),
}


@pytest.mark.parametrize("left", LEFT)
def test_only_what_has_checkpoint_json_is_one(
    left: str, root: str, training: job.Training, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in LEFT[left]:
        put(root, name)
    assert dt.resume(root) == (0, 0, None)
    said = capfd.readouterr().err
    assert "starts from the beginning" in said
    assert f"{LEFT[left][0].split('/')[0]}" in said and "no checkpoint.json in it" in said
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        dt.load(root)
    for action in ("ls", "show", "verify"):
        assert main(["checkpoint", action, root]) == 2
    assert "holds no checkpoint, but 0" in capfd.readouterr().err.replace("999999999999", "0")
    training.epoch()
    made = dt.save(root).path
    assert place.of(root).committed() == [made.rpartition("/")[2]]
    assert dt.resume(root) == (8, 1, made)
    assert [main(["checkpoint", action, root]) for action in ("ls", "show", "verify")] == [0, 0, 0]
    users = {name for name in LEFT[left] if "notes" in name or "/" not in name}
    assert users <= set(everything(root))  # what is not ours stays


def everything(root: str) -> list[str]:
    """All files below a folder."""
    there = place.of(root)
    if isinstance(there, place.Local):
        return [str(path.relative_to(there.root)) for path in there.root.rglob("*") if path.is_file()]
    return [name.split(f"{there.root}/", 1)[1] for name in there.store.find(there.root)]


def test_one_that_is_no_folder_is_named_as_such(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, 1.0)
    put(root, "000002-step-2/model-00000.safetensors")
    for action in ("ls", "show", "verify", "rm"):
        assert main(["checkpoint", action, f"{root}/000002-step-2"]) == 2
        assert "was not finished: it has no checkpoint.json" in capsys.readouterr().err


def test_from_inside_a_checkpoint(
    tmp_path: Path, training: job.Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that ends in a dot means the same to dt.load as to the commands."""
    made = dt.save(tmp_path).path
    monkeypatch.chdir(made)
    dt.load(".")
    assert main(["checkpoint", "show", "."]) == 0 and main(["convert", ".", str(tmp_path / "w.safetensors")]) == 0
    assert "000001-step-0, the newest of 1" in capsys.readouterr().out


# Kills.


class Killed(BaseException):
    """From here on nothing that the writer asks of the store is done."""


CALLS = ("open", "pipe_file", "rm", "rm_file", "makedirs")


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_store_after_a_kill_before_any_call(earlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    points = 0
    while True:
        root, calls = f"memory://kills/{uuid.uuid4().hex}", 0
        for value in range(earlier):
            write(root, 1.0 + value)

        def counted(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > points:  # noqa: B023
                raise Killed
            return real(*args, **more)

        with monkeypatch.context() as patch:
            for kind, name in [*((MemoryFileSystem, name) for name in CALLS), (MemoryFile, "close")]:
                real = getattr(kind, name)
                patch.setattr(kind, name, lambda *a, real=real, **k: counted(real, *a, **k))
            try:
                write(root, 7.0)
                break
            except Killed:
                points += 1
        place._remote_locks.clear()  # the dead hold none
        committed = place.of(root).committed()
        assert len(committed) >= min(earlier, 1)
        assert all(value_in(root, name) in (1.0, 2.0, 7.0) for name in committed)  # each is whole: none stops a resume
        assert newest(root) in ((float(earlier) or None), 7.0)
        write(root, 8.0)
        assert newest(root) == 8.0 and place.of(root).unfinished() == []
    assert points >= 8


# Links.


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """Another run's folder with a checkpoint, and its files."""
    folder = tmp_path / "other"
    write(folder, 5.0)
    return folder, contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", ["disk", "file://"])
def test_keep_removes_the_link_and_nothing_behind_it(kind: str, tmp_path: Path, other: tuple[Path, Any]) -> None:
    folder, before = other
    mine = tmp_path / "mine"
    root = str(mine) if kind == "disk" else f"file://{mine}"
    mine.mkdir()
    (mine / "000001-step-5").symlink_to(folder / "000001-step-5")
    assert place.of(root).committed() == ["000001-step-5"] and newest(root) == 5.0  # it may be gone on from
    for value in (6.0, 7.0):
        write(root, value)
    assert place.of(root).committed() == ["000003-step-7", "000002-step-6"]
    assert not (mine / "000001-step-5").is_symlink()
    assert contents(folder) == before and newest(folder) == 5.0


def test_rm_removes_the_link_and_nothing_behind_it(
    tmp_path: Path, other: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = other
    write(tmp_path / "mine", 1.0)
    link = tmp_path / "mine" / "000002-step-2"
    link.symlink_to(folder / "000001-step-5")
    assert main(["checkpoint", "rm", str(link), "--yes"]) == 0
    assert "removed 000002-step-2 (0 B)" in capsys.readouterr().out
    assert not link.is_symlink() and contents(folder) == before


def test_what_a_link_that_stays_leads_to_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (1.0, 2.0):
        write(tmp_path, value, keep=9)
    (tmp_path / "000003-step-1").symlink_to("000001-step-1")
    assert main(["checkpoint", "rm", str(tmp_path / "000001-step-1"), "--yes"]) == 0
    assert place.of(tmp_path).committed() == ["000002-step-2"]  # that was said: it may go
    (tmp_path / "000003-step-1").unlink()
    write(tmp_path, 3.0, keep=9)
    (tmp_path / "000004-step-2").symlink_to("000002-step-2")
    write(tmp_path, 5.0, keep=2)
    assert place.of(tmp_path).committed() == ["000005-step-5", "000004-step-2", "000002-step-2"]
    assert value_in(tmp_path, "000004-step-2") == 2.0
    shutil.rmtree(tmp_path / "000005-step-5")
    assert main(["checkpoint", "rm", str(tmp_path), "--keep", "1", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["checkpoint", "rm", str(tmp_path / "000002-step-2")]) == 2  # the link would be all that stays
    assert "no checkpoint that stays" in capsys.readouterr().err
    assert value_in(tmp_path, "000002-step-2") == 2.0


def test_links_among_what_is_left_are_not_followed(tmp_path: Path, other: tuple[Path, Any]) -> None:
    """Drafts, unfinished folders, files in checkpoints: of a link that is to go the link goes."""
    folder, before = other
    mine = tmp_path / "mine"
    write(mine, 1.0)
    target = folder / "000001-step-5"
    (mine / f".draft-{'0' * 32}").symlink_to(target)
    (mine / "000009-step-9").symlink_to(tmp_path / "nowhere")
    (mine / "000008-step-8").symlink_to(mine / "000008-step-8")
    (mine / "000007-step-7").mkdir()
    (mine / "000007-step-7" / "model-00000.safetensors").symlink_to(target / "model-00000.safetensors")
    (mine / "000001-step-1" / "state-00001.safetensors").symlink_to(target)
    unfinished = ["000009-step-9", "000008-step-8", "000007-step-7"]
    assert place.of(mine).committed() == ["000001-step-1"] and place.of(mine).unfinished() == unfinished
    for value in (2.0, 3.0):
        write(mine, value, keep=1)
    left = {"000003-step-3", "000009-step-9", "000008-step-8", ".lock"}
    assert {entry.name for entry in mine.iterdir()} == left
    assert contents(folder) == before


def test_a_folder_that_becomes_a_link_meanwhile(
    tmp_path: Path, other: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the removal: the removal itself follows no link."""
    folder, before = other
    for value in (1.0, 2.0):
        write(tmp_path / "mine", value)
    there = place.of(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine" / "000001-step-1")
    (tmp_path / "mine" / "000001-step-1").symlink_to(folder / "000001-step-5")
    monkeypatch.setattr(os.path, "islink", lambda _: False)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        there.remove("000001-step-1")
    there.drop("000001-step-1")
    assert contents(folder) == before


def test_one_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails must not look like a run that has not begun."""
    write(tmp_path, 1.0)
    real = os.lstat

    def fails(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("checkpoint.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", fails)
    assert place.of(tmp_path).committed() == ["000001-step-1"]
