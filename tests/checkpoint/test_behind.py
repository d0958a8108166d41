"""Saving behind training, resuming, falling back: one process; the same over ranks is in test_saving and resumed.py."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import distributedtorch as dt
from distributedtorch import behind
from distributedtorch.checkpoint import place
from distributedtorch.distribute import release
from tests.checkpoint import job


@pytest.fixture
def training():
    yield job.Training("ddp")
    release()


def weights(training: job.Training) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Slow:
    """Holds the copying of steady tensors until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.real = threading.Event(), behind._copy
        monkeypatch.setattr(behind, "_copy", self)

    def __call__(self, pieces, into) -> None:
        if any(piece.steady for piece in pieces):
            assert self.go.wait(20)
        self.real(pieces, into)


@pytest.fixture
def watched():
    yield job.Training("ddp,clip=1000000.0")  # a word that acts in one process too: backward is seen
    release()


def test_what_is_saved_by_itself_is_copied_until_backward_ends(
    watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    dt.resume(tmp_path, save_every=8)
    watched.epoch()
    before = weights(watched)
    under_way = behind.STATE.last
    assert under_way is not None and not under_way.copied.is_set()
    x, y = next(iter(watched.loader))
    loss = watched.model(x).sub(y).square().mean()
    threading.Timer(0.3, slow.go.set).start()
    loss.backward()
    assert under_way.copied.is_set() and under_way.stalled >= 0.2
    with torch.no_grad():
        watched.model.back.weight.data.mul_(2.0)  # what sharpness-aware training does between backward and step
    watched.optimizer.step()
    under_way.wait()
    assert not same(before, weights(watched))
    dt.load(under_way.path)
    names = [name for name in before if "norm.running" not in name]
    assert same({name: before[name] for name in names}, weights(watched))


def test_a_change_before_the_copy_is_noticed(watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    dt.resume(tmp_path, save_every=8)
    watched.epoch()
    with torch.no_grad():
        watched.model.back.weight.mul_(2.0)
    slow.go.set()
    assert behind.STATE.last is not None
    with pytest.raises(dt.CheckpointError, match=r"'model\.0/back\.weight' was changed while"):
        behind.STATE.last.wait()
    assert not place.of(tmp_path).committed()


def test_the_moment_of_the_call_is_what_is_saved(training, tmp_path: Path) -> None:
    training.epoch()
    before = weights(training)
    under_way = dt.save(tmp_path, wait=False)
    training.model.back.weight.data.clamp_(-0.01, 0.01)  # not seen by version counters
    training.epoch()
    under_way.wait()
    dt.load(under_way.path)
    assert same(before, weights(training))


def test_a_failure_is_said_within_one_step(training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        under_way = dt.save(tmp_path, wait=False)
        assert under_way._done.wait(20)
    x, y = next(iter(training.loader))
    training.model(x).sub(y).square().mean().backward()
    training.optimizer.step()
    said = capfd.readouterr().err
    assert "a save behind training has failed, training goes on" in said
    assert str(tmp_path) in said and "No space left on device" in said
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".draft")]
    training.optimizer.step()
    assert "has failed" not in capfd.readouterr().err


def test_resume_starts_or_goes_on(training, tmp_path: Path, capfd) -> None:
    resumed = dt.resume(tmp_path / "none", save_every=3)
    assert resumed == (0, 0, None)
    assert "nothing to resume in" in capfd.readouterr().err
    training.epoch()  # 8 steps: saved after 3 and 6
    training.epoch()
    behind.settle()
    names = place.of(tmp_path / "none").committed()
    assert [name.split("-")[-1] for name in names] == ["15", "12"]
    release()
    again = job.Training("ddp")
    resumed = dt.resume(tmp_path / "none")
    assert resumed[:2] == (15, 1)
    said = capfd.readouterr().err
    assert re.search(r"resumed from \S+000005-step-15: step 15, epoch 1, after batch 7 of its epoch", said)
    assert again.scheduler.last_epoch == 15


def test_the_one_before_is_taken_where_the_newest_is_damaged(training, tmp_path: Path, capfd) -> None:
    training.epoch()
    before = weights(training)
    dt.save(tmp_path)
    training.epoch()
    newest = Path(dt.save(tmp_path).path)
    file = newest / "model-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    dt.load(tmp_path)
    assert same(before, weights(training))
    said = capfd.readouterr().err
    assert (
        "000002-step-16 is damaged, the one before it is tried" in said
        and "model-00000.safetensors has changed" in said
    )
    with pytest.raises(dt.CheckpointError, match="has changed"):
        dt.load(newest)  # that one was meant
    (tmp_path / "000001-step-8" / "checkpoint.json").write_text("{}")
    held = weights(training)
    with pytest.raises(dt.CheckpointError, match="2 checkpoints are damaged"):
        dt.resume(tmp_path)
    assert same(held, weights(training))


class Average:
    """A user's own object."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value, self.count = state["value"], state["count"]


def test_state_of_the_users_own(training, tmp_path: Path) -> None:
    average, scaler = Average(), torch.amp.GradScaler("cpu", init_scale=8.0)
    average.value += 2.5
    average.count = 7
    stop = dt.EarlyStop(patience=3)
    stop(1.0)
    stop(2.0)
    state = {"average": average, "scaler": scaler, "stop": stop}
    dt.save(tmp_path, state=state)
    other, later = Average(), dt.EarlyStop(patience=3)
    dt.load(tmp_path, state={"average": other, "stop": later})
    assert other.count == 7 and torch.equal(other.value, average.value) and later.waited == 1
    with pytest.raises(
        dt.CheckpointError, match=r"names 'other', and the checkpoint has \['average', 'scaler', 'stop'\]"
    ):
        dt.load(tmp_path, state={"other": other})
    with pytest.raises(dt.CheckpointError, match=r"state_dict\(\) and load_state_dict\(\)"):
        dt.save(tmp_path, state={"x": 3})


@pytest.mark.parametrize("given", [0, -1, True, 2.5, "often", "10 parsecs", "0s", timedelta(0)])
def test_save_every_that_says_nothing(given, training, tmp_path: Path) -> None:
    with pytest.raises(dt.CheckpointError, match="do: save_every=500"):
        dt.resume(tmp_path, save_every=given)


def test_save_every_by_time(training, tmp_path: Path) -> None:
    dt.resume(tmp_path, save_every="0.000001s")
    training.epoch()
    behind.settle()
    assert place.of(tmp_path).committed()[0].endswith("-step-8")


def test_keep(training, tmp_path: Path) -> None:
    for _ in range(4):
        dt.save(tmp_path, keep=3)
    assert len(place.of(tmp_path).committed()) == 3
    with pytest.raises(dt.CheckpointError, match="keep=0"):
        dt.save(tmp_path, keep=0)


def test_a_schedule_that_was_made_here_is_saved_and_others_are_named(training, tmp_path: Path, capfd) -> None:
    made = dt.schedule(training.optimizer, "cosine", steps=40)
    forgotten = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)
    scaler = torch.amp.GradScaler("cpu")
    training.epoch()
    for _ in range(3):
        made.step()
    dt.save(tmp_path)
    dt.save(tmp_path)
    said = capfd.readouterr().err
    assert said.count("a StepLR of this script is not in the checkpoint") == 1
    assert said.count("a GradScaler of this script is not in the checkpoint") == 1 and "CosineAnnealing" not in said
    held = made.state_dict()
    made.step()
    dt.load(tmp_path)
    assert made.state_dict() == held and forgotten.last_epoch == 0 and scaler.is_enabled()


def test_another_loader_than_the_one_given(training, tmp_path: Path) -> None:
    """`save_every` acts though no batch comes from a loader that was given."""
    dt.resume(tmp_path, save_every=2)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(5):
        training.model(x).square().mean().backward()
        training.optimizer.step()
    behind.settle()
    assert [name.split("-")[-1] for name in place.of(tmp_path).committed()] == ["4", "2"]


def test_a_save_by_hand_beside_save_every(training, tmp_path: Path) -> None:
    average = Average()
    dt.resume(tmp_path, save_every=3, state={"average": average})
    dt.save(tmp_path)
    training.epoch()
    behind.settle()
    _ = dt.save(tmp_path, wait=False, state={"average": average})
    dt.load(tmp_path, state={"average": average})
    assert [name.split("-")[-1] for name in place.of(tmp_path).committed()] == ["8", "6"]


def test_two_loaders_at_once(training, tmp_path: Path) -> None:
    other = DataLoader(torch.zeros(64, 1), 8)
    other = dt.distribute(other)
    dt.resume(tmp_path, save_every=1, keep=20)
    for (x, y), _ in zip(training.loader, other, strict=True):
        training.model(x).sub(y).square().mean().backward()
        training.optimizer.step()
    behind.settle()
    assert len(place.of(tmp_path).committed()) == 8


def test_schedulers_step_before_a_periodic_save_without_loaders(training, tmp_path: Path) -> None:
    dt.resume(tmp_path, save_every=4)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(5):
        training.model(x).square().mean().backward()
        training.optimizer.step()
        training.scheduler.step()
    behind.settle()
    release()
    again = job.Training("ddp")
    dt.load(tmp_path)
    assert again.scheduler.last_epoch == 4 and again.scheduler.get_last_lr() == [5e-3]


def test_state_of_the_optimizer_that_is_no_parameters(training, tmp_path: Path) -> None:
    training.optimizer.state["global"] = {"k": 3, "t": torch.ones(2)}
    dt.save(tmp_path)
    training.optimizer.state["global"] = {}
    dt.load(tmp_path)
    assert training.optimizer.state["global"]["k"] == 3 and training.optimizer.state["global"]["t"].tolist() == [1, 1]


def test_a_part_is_no_damage(training, tmp_path: Path) -> None:
    dt.save(tmp_path)
    training.epoch()
    before = weights(training)
    dt.save(tmp_path, model=training.model)
    training.epoch()
    dt.load(tmp_path)
    assert same(before, weights(training))


def test_another_batch_size_in_the_middle_of_an_epoch(training, tmp_path: Path) -> None:
    for _ in zip(range(3), training.loader, strict=False):
        pass
    walk = iter(training.loader)
    next(walk)
    dt.save(tmp_path)
    del walk
    training.loader.batch_sampler.batch_size = 16
    with pytest.raises(dt.CheckpointError, match="middle of an epoch of 8 batches of 8 rows"):
        dt.load(tmp_path)


def test_load_inside_a_walk(training, tmp_path: Path) -> None:
    dt.save(tmp_path)
    with pytest.raises(dt.UsageError, match="begin again"):
        for _ in training.loader:
            dt.load(tmp_path)


def copies(module, state, prefix, local) -> None:
    for name in [name for name, value in state.items() if isinstance(value, torch.Tensor)]:
        state[name] = state[name].clone()


class Hooked(torch.nn.Linear):
    """Its state_dict holds copies, an extra state, and a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(copies)
        self.seen: list[object] = []

    def get_extra_state(self) -> object:
        return (1, float("inf"))

    def set_extra_state(self, state: object) -> None:
        self.seen.append(state)

    def _load_from_state_dict(self, state, prefix, metadata, *args) -> None:  # type: ignore[no-untyped-def]
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_hooks_extra_state_and_versions(tmp_path: Path) -> None:
    model = Hooked()
    dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        before = model.weight.detach().clone()
        dt.save(tmp_path)
        with torch.no_grad():
            model.weight.zero_()
        dt.load(tmp_path)
        assert torch.equal(model.weight, before) and 3 in model.seen and (1, float("inf")) in model.seen
    finally:
        release()


def test_a_save_that_is_due_where_the_loop_is_left(training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "_SECONDS_TO_FAIL", 0.01)
    dt.resume(tmp_path, save_every=3)

    def three_steps() -> None:
        for number, (x, y) in enumerate(training.loader):
            training.model(x).sub(y).square().mean().backward()
            training.optimizer.step()
            training.scheduler.step()
            if number == 2:
                break

    three_steps()
    behind.settle()
    assert [name.split("-")[-1] for name in place.of(tmp_path).committed()] == ["3"]
    monkeypatch.setattr(behind.record, "failed", lambda: True)  # an error left the loop, and reached the top
    three_steps()
    with pytest.raises(dt.CheckpointError, match="left by an error"):
        behind.STATE.last.wait()
    release()
    again = job.Training("ddp")
    assert dt.resume(tmp_path)[:2] == (3, 1) and again.scheduler.last_epoch == 3


HELD = """
import sys, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import distributedtorch as dt
torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = dt.distribute(model, optimizer, DataLoader(data, batch_size=5))
dt.resume("saved", save_every=int(sys.argv[1]))
batches = iter(loader)
for _ in range(4):
    x, y = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
"""The iterator is held to the end, which the loop does not come to."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("start", "every"),
    [
        ((), 4),
        pytest.param((), 2, marks=pytest.mark.long),
        pytest.param(("-m", "distributedtorch", "run", "--workers", "2"), 4, marks=pytest.mark.long),
    ],
    ids=["one process", "one process, saved before", "two ranks"],
)
def test_an_iterator_that_is_held_to_the_end(start: tuple[str, ...], every: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HELD)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, "train.py", str(every)]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    saved = sorted(path.name[7:] for path in (tmp_path / "saved").glob("*-step-*"))
    assert saved == [f"step-{n}" for n in range(every, 5, every)]
