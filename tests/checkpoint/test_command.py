"""`dtorch checkpoint`: what it prints, that it finds damage, that it never loses the last good checkpoint."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import distributedtorch as dt
from distributedtorch.checkpoint import aligned, blocks, index, place
from distributedtorch.checkpoint.picture import bar
from distributedtorch.cli import main
from distributedtorch.distribute import release
from tests.checkpoint import job
from tests.checkpoint.files import newest, write

MODEL = "model-00000.safetensors"


class Said:
    """One command: its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        self.capsys.readouterr()
        got = main(["checkpoint", *map(str, words)])
        said = self.capsys.readouterr()
        assert got == code, said
        assert (said.err == "") == (code < 2)
        return said.err if code == 2 else said.out


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with two checkpoints."""
    write(tmp_path / "c", 1.0)
    write(tmp_path / "c", 2.0)
    return tmp_path / "c"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dt.save` writes of a small training."""

    class Best:
        def state_dict(self) -> dict[str, object]:
            return {"loss": 0.5, "weights": torch.ones(3)}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    folder = tmp_path_factory.mktemp("trained")
    training = job.Training("ddp")
    training.epoch()
    dt.save(folder, state={"best": Best()})
    release()
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def forge(root: Path, name: str, change: Callable[[dict[str, object]], None]) -> None:
    """Another content with a right hash."""
    file = root / name / "checkpoint.json"
    content = json.loads(file.read_text())["checkpoint"]
    change(content)
    file.write_bytes(index.text(content))


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines()[2:]}


# ls


def test_ls(two: Path, said: Said) -> None:
    text = said("ls", two)
    assert text.splitlines()[0] == f"{two}: 2 checkpoints"
    assert list(rows(text)) == ["000002-step-2", "000001-step-1"]
    assert rows(text)["000002-step-2"][1:4] == ["2", "ddp", "1"] and rows(text)["000002-step-2"][-1] == "newest"
    assert "ago)" in text and text.count("newest") == 1
    assert list(rows(said("ls", two / "000001-step-1"))) == ["000001-step-1"]
    assert rows(said("ls", f"{two}/"))


def test_ls_says_damage_in_its_row(tmp_path: Path, said: Said) -> None:
    for value in range(1, 8):
        write(tmp_path, float(value), keep=9)
    (tmp_path / "000007-step-7" / "checkpoint.json").unlink()
    flip(tmp_path / "000006-step-6" / "checkpoint.json")
    (tmp_path / "000005-step-5" / MODEL).unlink()
    os.truncate(tmp_path / "000004-step-4" / MODEL, 100)
    forge(tmp_path, "000003-step-3", lambda c: c.update(format=2, versions={"distributedtorch": "9.9"}))
    (tmp_path / "000008-step-8").write_text("a file")
    text = said("ls", tmp_path)
    assert text.splitlines()[0] == f"{tmp_path}: 6 checkpoints"
    assert text.splitlines()[-1] == "  no checkpoints, as they have no checkpoint.json: 000008-step-8, 000007-step-7"
    found = {name: " ".join(row) for name, row in rows(text).items()}
    assert "000007-step-7" not in found and "000008-step-8" not in found
    assert "damaged: checkpoint.json has changed since it was written" in found["000006-step-6"]
    assert f"damaged: {MODEL} is missing" in found["000005-step-5"]
    assert f"damaged: {MODEL} has 100 of " in found["000004-step-4"]
    assert "newer: checkpoint.json has format 2, written by " in found["000003-step-3"]
    assert found["000002-step-2"].endswith("newest") and not found["000001-step-1"].endswith("newest")


def test_a_store(said: Said) -> None:
    root = "memory://tests/command"
    for value in (1.0, 2.0):
        write(root, value)
    assert rows(said("ls", root))["000002-step-2"][-1] == "newest"
    assert "000001-step-1, one of 2 in memory://tests/command" in said("show", f"{root}/000001-step-1")
    assert said("verify", root).count("whole: ") == 2
    said("rm", root, "--keep", "1", "--yes")
    assert place.of(root).committed() == ["000002-step-2"]


# show


def test_show(trained: Path, said: Said) -> None:
    text = said("show", trained)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == f"000001-step-8, the newest of 1 in {trained}"
    assert lines[1:4] == ["step 8", "plan ddp", "world 1 rank"]
    assert f"versions distributedtorch {dt.__version__}, torch {torch.__version__}" in lines
    assert "model.0 Net 284 values in 10 tensors (parameters and buffers) 240 with an optimizer 2.2 KiB" in lines
    assert any(line.startswith("group 0: 5 parameters; lr 0.005, betas (0.8, 0.9)") for line in lines)
    assert "state of 5 parameters: step, exp_avg, exp_avg_sq" in lines
    assert any(line.startswith("scheduler.0 MultiStepLR milestones") for line in lines)
    assert "loader.0 epoch 0, at its end" in lines
    assert "best 1 tensor, 12 B" in lines
    assert "first.weight 16 x 6 float64 768 B [0000000000000000] model-00000" in lines
    assert "tied.weight is first.weight" in lines
    assert "and 5 tensors more, " in text and "random/0" not in text
    whole = said("show", trained, "--all")
    assert "--all" not in whole and "tensors of random" in whole and len(whole) > len(text)


def test_show_what_the_test_helper_writes(two: Path, said: Said) -> None:
    assert said("show", two).startswith("000002-step-2, the newest of 2")
    assert said("show", two / "000001-step-1").startswith("000001-step-1, one of 2")


def test_show_from_inside(two: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two / "000001-step-1")
    assert said("show", ".").startswith("000001-step-1, one of 2")
    assert said("show", "..").startswith("000002-step-2, the newest of 2")
    monkeypatch.chdir(two)
    assert said("show", "000001-step-1").startswith("000001-step-1, one of 2")


def test_the_bar() -> None:
    def entry(*stops: int) -> index.Entry:
        starts = (0, *stops[:-1])
        parts = tuple(
            index.Part(file=f"model-{rank:05d}.safetensors", name="x", start=start, stop=stop)
            for rank, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )
        return index.Entry(shape=(stops[-1],), dtype=torch.float32, stride=None, parts=parts)

    assert bar(entry(100)) == "[0000000000000000]"
    assert bar(entry(25, 50, 75, 100)) == "[0000111122223333]"
    assert bar(entry(0, 100)) == "[1111111111111111]"
    assert bar(entry(75, 100)) == "[0000000000001111]"
    assert bar(entry(1, 2)) == "[0000000011111111]"
    assert bar(entry(*range(1, 41)))[-2] == "2"  # rank 38: the marks have begun again
    assert bar(entry(0)) == "[                ]"


def test_show_of_a_forged_index(two: Path, said: Said) -> None:
    for change in (
        lambda c: c.update(world="many"),
        lambda c: c.pop("plan"),
        lambda c: c.update(versions=3),
        lambda c: c["run"].update(optimizers=[{"kind": "x"}]),
        lambda c: c["run"].update(loaders=[{"cursor": 1}]),
    ):
        before = (two / "000002-step-2" / "checkpoint.json").read_bytes()
        forge(two, "000002-step-2", change)
        assert "is not what dt.save writes" in said("show", two, code=2)
        said("ls", two)
        (two / "000002-step-2" / "checkpoint.json").write_bytes(before)


def test_control_characters_do_not_reach_the_terminal(two: Path, said: Said) -> None:
    forge(two, "000002-step-2", lambda c: c.update(plan="ddp\x1b[2J\nx", versions={"x\r": "1"}))
    for text in (said("ls", two), said("show", two)):
        assert "ddp?[2J?x" in text and "\x1b" not in text and "\r" not in text


# verify


def test_verify(two: Path, said: Said) -> None:
    text = said("verify", two)
    assert text.count(" ok ") == 6 and text.count("whole: ") == 2
    flip(two / "000001-step-1" / MODEL)
    text = said("verify", two, code=1)
    assert f"  {MODEL}     WRONG  has changed since it was written (bytes 0 to " in text
    assert text.count(" ok ") == 5 and "damaged: 1 file" in text
    assert "000001" not in said("verify", two / "000002-step-2")
    (two / "000002-step-2" / "state-00000.safetensors").unlink()
    (two / "000002-step-2" / "model-00007.safetensors").write_text("?")
    text = said("verify", two / "000002-step-2", code=1)
    assert "state-00000.safetensors     WRONG  is missing" in text and "does not belong to this checkpoint" in text
    flip(two / "000002-step-2" / "checkpoint.json")
    assert "checkpoint.json             WRONG  has changed" in said("verify", two / "000002-step-2", code=1)


def test_verify_reads_the_last_block(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64)
    name = write(tmp_path, 1.0, 400)
    said("verify", tmp_path)
    flip(tmp_path / name / MODEL)  # far behind the header
    assert "WRONG  has changed since it was written (bytes 1,6" in said("verify", tmp_path, code=1)


def test_verify_meets_a_newer_format(two: Path, said: Said) -> None:
    forge(two, "000002-step-2", lambda c: c.update(format=2))
    assert "needed: format 1 or older" in said("verify", two, code=2)
    flip(two / "000001-step-1" / MODEL)
    assert "not checked: checkpoint.json has format 2" in said("verify", two, code=1)


# rm


def answer(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setattr("builtins.input", lambda _: word)


def test_rm_one(two: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "")
    assert said("rm", two / "000001-step-1", code=1).endswith("nothing was removed\n")
    assert len(place.of(two).committed()) == 2
    answer(monkeypatch, "y")
    text = said("rm", two / "000001-step-1")
    assert "000002-step-2 stays: every byte was read" in text and "removed 000001-step-1 (" in text
    assert sorted(entry.name for entry in two.iterdir()) == [".lock", "000002-step-2"]


def test_rm_all_but_the_newest(tmp_path: Path, said: Said) -> None:
    for value in range(1, 6):
        write(tmp_path, float(value), keep=9)
    (tmp_path / "notes.txt").write_text("not ours")
    assert said("rm", tmp_path, "--keep", 2, "--yes").count("removed ") == 3
    assert place.of(tmp_path).committed() == ["000005-step-5", "000004-step-4"]
    assert "nothing to remove: 2 checkpoints" in said("rm", tmp_path, "--keep", 2, "--yes")
    assert (tmp_path / "notes.txt").exists() and newest(tmp_path) == 5.0


def test_rm_keeps_the_only_good_one(two: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    flip(two / "000002-step-2" / MODEL)
    words = "no checkpoint that stays in"
    assert words in said("rm", two, "--keep", 1, "--yes", code=2)
    assert words in said("rm", two / "000001-step-1", code=2)
    assert len(place.of(two).committed()) == 2
    said("rm", two / "000002-step-2", "--yes")  # damaged: it may go
    assert newest(two) == 1.0
    assert words in said("rm", two / "000001-step-1", code=2)
    assert newest(two) == 1.0
    said("rm", two / "000001-step-1", "--yes")
    assert place.of(two).committed() == []


def test_rm_of_nothing_but_damage(two: Path, said: Said) -> None:
    for name in place.of(two).committed():
        flip(two / name / MODEL)
    said("rm", two, "--keep", 1, "--yes")
    assert place.of(two).committed() == ["000002-step-2"]


def test_rm_holds_a_newer_format_to_be_good(two: Path, said: Said) -> None:
    flip(two / "000002-step-2" / MODEL)
    forge(two, "000001-step-1", lambda c: c.update(format=2))
    assert "000001-step-1 would be removed" in said("rm", two, "--keep", 1, "--yes", code=2)


def _hold(root: Path, ready, done) -> None:
    write(root, 1.0)
    write(root, 2.0)
    ready.set()
    done.wait(30)


def test_rm_beside_a_job_that_writes(tmp_path: Path, said: Said) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(30)
    assert "is being written by another job" in said("rm", tmp_path, "--keep", 1, "--yes", code=2)
    assert len(place.of(tmp_path).committed()) == 2
    done.set()
    other.join()
    said("rm", tmp_path, "--keep", 1, "--yes")
    assert place.of(tmp_path).committed() == ["000002-step-2"]


def test_rm_when_the_folder_changed_meanwhile(two: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: str) -> str:
        place.of(two).remove("000002-step-2")
        return "y"

    monkeypatch.setattr("builtins.input", slow)
    assert "have changed since" in said("rm", two, "--keep", 1, code=2)
    assert newest(two) == 1.0


def test_rm_that_cannot_be_meant(two: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a folder" in said("rm", two, "--yes", code=2)
    for keep in (0, -1):
        assert f"--keep {keep}" in said("rm", two, "--keep", keep, "--yes", code=2)
    assert "--keep 1 and the checkpoint" in said("rm", two / "000001-step-1", "--keep", 1, "--yes", code=2)
    (two / "000001-step-1" / "checkpoint.json").unlink()
    assert "was not finished" in said("rm", two / "000001-step-1", "--yes", code=2)
    write(two, 3.0)

    def gone(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", gone)
    assert "give --yes" in said("rm", two, "--keep", 1, code=2)
    assert len(place.of(two).committed()) == 2


# What is not there.


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p / "nowhere", "there is no folder"),
    "missing one": (lambda p: write(p, 1.0) and p / "000009-step-1", "name one that is there: 000001-step-1"),
    "missing both": (lambda p: p / "nowhere" / "000009-step-1", "there is no folder"),
    "empty": (lambda p: p, "is empty"),
    "file": (lambda p: (p / "f").write_text("x") and p / "f", "is a file"),
    "under a file": (lambda p: (p / "f").write_text("x") and p / "f" / "000009-step-1", "is a file"),
    "foreign": (lambda p: (p / "thesis.txt").write_text("x") and p, "holds no checkpoint, but thesis.txt"),
    "empty store": (lambda _: "memory://tests/none", "is empty"),
    "unknown store": (lambda _: "nothing://x", "fsspec"),
}


@pytest.mark.parametrize("action", ["ls", "show", "verify", "rm"])
@pytest.mark.parametrize("kind", PLACES)
def test_no_checkpoint_there(kind: str, action: str, tmp_path: Path, said: Said) -> None:
    make, words = PLACES[kind]
    path = make(tmp_path)
    text = said(action, path, code=2)
    assert text.startswith("dtorch: ") and words in text
    assert "needed: " in text and "do: " in text
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / ".lock").exists() or kind == "missing one"


def test_damaged_and_newer_are_not_shown(two: Path, said: Said) -> None:
    forge(two, "000002-step-2", lambda c: c.update(format=2, versions={"distributedtorch": "9.9"}))
    text = said("show", two, code=2)
    assert "has format 2, written by {'distributedtorch': '9.9'}" in text and "needed: format 1 or older" in text
    flip(two / "000001-step-1" / "checkpoint.json")
    assert "has changed since it was written" in said("show", two / "000001-step-1", code=2)


def test_a_store_that_fails(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> list[str]:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(place.Remote, "entries", fails)
    assert "RuntimeError: no credentials" in said("ls", "memory://tests/command", code=2)
    monkeypatch.setattr(place.Local, "entries", lambda _: os.listdir("/proc/1/fd/none"))
    assert "do: check the path" in said("ls", "anywhere", code=2)


# In words.


def test_sizes_and_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [aligned.size(n) for n in (0, 999, 1000, 1 << 20, 3 << 40)] == [
        "0 B",
        "999 B",
        "1.0 KiB",
        "1.0 MiB",
        "3.0 TiB",
    ]
    monkeypatch.setattr(aligned.time, "time", lambda: 1_000_000.0)
    said = [aligned.when(1_000_000.0 - ago).split("(")[1] for ago in (-5, 5, 119, 120, 7200, 86400 * 3)]
    assert said == ["0 s ago)", "5 s ago)", "119 s ago)", "2 min ago)", "2 h ago)", "3 days ago)"]
    assert aligned.when(None) == ""
    assert aligned.clip("abcdefghij", 7) == "ab...ij"


def test_a_terminal_without_unicode(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(two, "000002-step-2", lambda c: c.update(plan="ddp·π"))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["checkpoint", "ls", str(two)]) == 0
    assert b"ddp??" in written.getvalue()


def test_a_pipe_that_closes_early(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write_ = os.pipe()
    os.close(read)
    with os.fdopen(write_, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit):
            main(["checkpoint", "verify", str(two)])


def test_no_torch_where_nothing_is_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distributedtorch", "checkpoint", "ls", str(tmp_path / "no")]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2 and "there is no folder" in ended.stderr and "Traceback" not in ended.stderr
    imported = re.findall(r"\| +([\w.]+)$", ended.stderr, flags=re.MULTILINE)
    assert "distributedtorch.checkpoint.aligned" in imported and "torch" not in imported
