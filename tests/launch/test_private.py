"""Run folders and logs are this user's alone, whatever another user has planted where they go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import private, record
from distributedtorch.launch.place import Place
from distributedtorch.launch.start import log_folder
from distributedtorch.launch.supervise import run_folder

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
RANK = Place(rank=1, world=2, local_rank=1, local_world=2, launcher="torchrun", run_folder=None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and a temporary folder of its own."""
    for name in ("work", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    log_folder.cache_clear()
    return tmp_path / "work"


def test_a_run_folder_is_new_private_and_not_to_be_guessed(here: Path) -> None:
    first, second = run_folder(), run_folder()
    assert first.parent == second.parent == here / ".dtorch"
    assert first.name[:15] <= second.name[:15] and first.name[16:] != second.name[16:]
    assert all(private.is_private(folder) for folder in (first, second, here / ".dtorch"))


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link", "link to ours"])
def test_what_another_user_has_made_is_not_used(here: Path, tmp_path: Path, kind: str) -> None:
    planted = here / ".dtorch"
    if kind == "folder":
        planted.mkdir()
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        planted.symlink_to(tmp_path / "elsewhere")
        os.chown(tmp_path / "elsewhere", OTHER if kind == "link" else os.geteuid(), -1)
    os.chown(planted, OTHER, OTHER, follow_symlinks=False)
    for folder in (run_folder(), log_folder(RANK)):
        assert folder is not None and folder.parent == tmp_path / "tmp" / f"dtorch-{os.geteuid()}"
    assert not list(planted.iterdir())


@needs_root
def test_nothing_private_to_be_had_is_refused(here: Path, tmp_path: Path) -> None:
    for planted in (here / ".dtorch", tmp_path / "tmp" / f"dtorch-{os.geteuid()}"):
        planted.mkdir()
        os.chown(planted, OTHER, OTHER)
    with pytest.raises(LaunchError, match=r"not this user's alone\n  needed: .*\n  do: "):
        run_folder()


def test_ones_own_is_used_and_closed_to_others(here: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o777)
    (tmp_path / "scratch").chmod(0o777)
    (here / ".dtorch").symlink_to(tmp_path / "scratch")
    assert run_folder().parent == here / ".dtorch"
    assert (tmp_path / "scratch").stat().st_mode & 0o777 == 0o755


def test_a_working_folder_that_is_gone_or_read_only_costs_no_log(here: Path, tmp_path: Path) -> None:
    here.rmdir()
    assert run_folder().parent == tmp_path / "tmp" / f"dtorch-{os.geteuid()}"


def test_no_link_is_followed_to_a_file(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("of another kind")
    (tmp_path / "step.1").symlink_to(target)
    (tmp_path / "rank1.log").symlink_to(target)
    with pytest.raises(OSError, match=r"step\.1"):
        record._shared_step(tmp_path / "step.1")
    for new in (True, False):
        with pytest.raises(OSError, match=r"rank1\.log"):
            private.create(tmp_path / "rank1.log", os.O_WRONLY, new=new)
    assert target.read_text() == "of another kind"


def test_logs_of_a_starters_job_stay_in_one_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../../a/b")
    folder = log_folder(RANK)
    assert folder is not None and folder.parent == here / ".dtorch"
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")  # as a script may
    assert log_folder(RANK) == folder
