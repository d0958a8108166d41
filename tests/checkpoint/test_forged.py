"""What was not written by us, with hashes that are right: refused before anything is changed, in bounded memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.optim import lr_scheduler

import distributedtorch as dt
from distributedtorch import sound, stored
from distributedtorch.checkpoint import foreign, index, place
from distributedtorch.cli import main
from distributedtorch.core.errors import explain
from distributedtorch.distribute import release
from tests.checkpoint import bombs, dcp_job
from tests.checkpoint.bombs import MIB
from tests.checkpoint.files import write
from tests.checkpoint.forged import INDEXES, Training, measured, systematic, written
from tests.checkpoint.test_convert import adam, as_deepspeed, trained, zero_files  # noqa: F401 (a fixture)

TIMES_FILES, TIMES_PICKLES, BESIDE = 4, 100, 128 * MIB
"""What docs/checkpoint.md says of the memory of a conversion."""


def split(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """All names for a parameter, those that are not quick for long runs."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release()


@pytest.fixture
def forgery(tmp_path: Path) -> tuple[Training, Path, dict[str, Any]]:
    """A run in the middle of an epoch, a checkpoint of another moment of it, and that one's content."""
    training = Training()
    training.train(11)
    file = training.save(tmp_path / "c")
    training.train(2)
    return training, file, json.loads(file.read_text())["checkpoint"]


# Indexes.


def refused(training: Training, file: Path, content: dict[str, Any]) -> str:
    """What is wrong with how a forged index is refused; nothing: it is refused, and nothing was changed."""
    file.write_bytes(written(content))
    before = training.state()
    try:
        training.load(file.parents[1])
        return "loaded"
    except dt.CheckpointError as error:
        said = str(error)
    after = training.state()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        return f"changed {', '.join(changed)}"
    return "" if "needed: " in said and "do: " in said else f"refused without words: {said}"


def test_a_forged_index_changes_nothing(forgery: tuple[Training, Path, dict[str, Any]]) -> None:
    training, file, content = forgery
    wrong = {}
    for name, change in INDEXES.items():
        forged = copy.deepcopy(content)
        change(forged)
        found = refused(training, file, forged)
        if found:
            wrong[name] = found
    assert not wrong
    file.write_bytes(written(content))
    training.load(file.parents[1])  # the real one is taken
    assert training.own.count == 3
    training.train(3)


def test_without_the_look_before_state_is_changed(
    forgery: tuple[Training, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: were nothing looked at, the table would say so."""
    training, file, content = forgery
    monkeypatch.setattr(stored.Stored, "_see", lambda _: None)
    found = []
    for name in ("plan is a number", "no step", "ended is a number", "milestones are none"):
        forged = copy.deepcopy(content)
        INDEXES[name](forged)
        found.append(refused(training, file, forged).partition(" ")[0])
    assert set(found) <= {"changed", "loaded"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_place_of_an_index(forgery: tuple[Training, Path, dict[str, Any]]) -> None:
    training, file, content = forgery
    wrong, ends = {}, {"": 0, "loaded": 0}
    for name, forged in systematic(content):
        found = refused(training, file, forged)
        if found in ends:
            ends[found] += 1
        else:
            wrong[name] = found
        if found:
            training = Training()
            training.train(2)
    assert not wrong
    assert ends[""] > 1500 and ends["loaded"] > 200


def test_a_hole_is_not_read(tmp_path: Path) -> None:
    name = write(tmp_path, 1.0)
    file = tmp_path / name / "checkpoint.json"
    good = file.read_bytes()
    for size in (8 << 30, index.MOST_BYTES - 1):
        for content in (b"", good):
            with file.open("wb") as opened:
                opened.write(content)
                opened.truncate(size)
            said, grown = measured(lambda: index.read(place.of(tmp_path), name).digest)
            assert said.startswith("CheckpointError"), said
            assert grown < 64 * MIB


def test_tensors_that_are_named_over_and_over(tmp_path: Path) -> None:
    """The same tensor many times in an object's state: one tensor; over many objects' states: refused."""

    class Keeps:
        def state_dict(self) -> dict[str, Any]:
            return {"x": torch.zeros(4 * MIB)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    dt.distribute(nn.Linear(2, 2))
    file = Path(dt.save(tmp_path, state={"own": Keeps()}).path) / "checkpoint.json"
    content = json.loads(file.read_text())["checkpoint"]
    own = content["run"]["user"]["own"]
    own |= {f"x{number}": own["x"] for number in range(1000)}
    file.write_bytes(written(content))
    one = Keeps()
    said, grown = measured(lambda: dt.load(tmp_path, state={"own": one}) or len({id(v) for v in one.state.values()}))
    assert said == 1 and grown < 64 * MIB
    content["run"]["user"] = {f"o{number}": {"x": own["x"]} for number in range(1000)}
    file.write_bytes(written(content))
    said, grown = measured(lambda: dt.load(tmp_path, state={name: Keeps() for name in content["run"]["user"]}))
    assert "CheckpointError" in said and "are named" in said and grown < 64 * MIB


def test_a_stream_is_passed_over_to_its_end_only(tmp_path: Path) -> None:
    """A stream does not say how long it is, and a saved place may lie behind its end."""

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(12, 2))

    _, loader = dt.distribute(nn.Linear(2, 2), torch.utils.data.DataLoader(Stream(), 4))
    walk = iter(loader)
    next(walk)
    file = Path(dt.save(tmp_path).path) / "checkpoint.json"
    del walk
    content = json.loads(file.read_text())["checkpoint"]
    content["run"]["loaders"][0]["cursor"].update(batch=1 << 60, batches=1 << 60, samples=1 << 62)
    file.write_bytes(written(content))
    dt.load(tmp_path)
    assert list(loader) == []


def test_an_object_that_takes_nothing_back_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    file = training.save(tmp_path)
    training.train(2)
    content = json.loads(file.read_text())["checkpoint"]
    content["run"]["user"]["own"].pop("weights")
    assert refused(training, file, content) in ("", "changed own")


# No false alarms.


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "a tensor's lr": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"eps": (None, 1e-3)}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "lbfgs": (torch.optim.LBFGS, {"history_size": 3}),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False, scale_fn=lambda x: 1.0),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ours": lambda o: dt.schedule(o, "cosine", steps=20, warmup=2),
}


def steps(made: tuple[Any, ...], count: int) -> list[torch.Tensor]:
    model, optimizer, *more = made
    for number in range(count):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(3, 4)) * (number + 1)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        for scheduler in more:
            scheduler.step()
    return [param.detach().clone() for param in model.parameters()]


QUICK = ("nesterov", "a tensor's lr", "adafactor", "lbfgs", "cyclic", "sequence")


@pytest.mark.parametrize("name", split([*OPTIMIZERS, *SCHEDULERS], QUICK))
def test_what_was_saved_is_taken(name: str, tmp_path: Path) -> None:
    """Into a run that has not begun, and from the beginning into one that has."""
    kind, given = OPTIMIZERS.get(name, OPTIMIZERS["nesterov"])

    def build() -> tuple[Any, ...]:
        release()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = kind(model.parameters(), **given)
        return dt.distribute(model, optimizer, *([SCHEDULERS[name](optimizer)] if name in SCHEDULERS else []))

    made = build()
    dt.save(tmp_path / "first")
    steps(made, 3)
    dt.save(tmp_path / "later")
    due = steps(made, 2)
    made = build()
    dt.load(tmp_path / "later")
    assert all(map(torch.equal, steps(made, 2), due))
    dt.load(tmp_path / "first")
    steps(made, 3)
    assert all(map(torch.equal, steps(made, 2), due))


@pytest.mark.parametrize(
    ("saved", "have", "fits"),
    [
        ([0.9, 0.99], (0.8, 0.9), True),  # as DCP gives tuples
        (None, True, True),
        (True, None, True),
        (0.1, torch.tensor(0.1), True),
        (torch.tensor(0.1), 0.1, True),
        (0, 0.01, True),
        (True, 0, True),
        (1, False, True),
        ("x", "y", True),
        ([1, 2, 3], [], True),
        ({"a": 1}, {}, True),
        (3.5, None, True),
        ("x", 0.1, False),
        (None, 0.1, False),
        (10**30, 0.1, False),
        (torch.ones(2), 0.1, False),
        (torch.ones(2), None, False),
        (torch.ones(2), torch.ones(2), True),
        ((0.9,), (0.9, 0.99), False),
        (5, True, False),
        (5, "x", False),
        (5, (1, 2), False),
        (5, {}, False),
    ],
)
def test_options_that_fit(saved: Any, have: Any, fits: bool) -> None:
    assert sound.alike(saved, have) is fits


# Files of other libraries.


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DCP's folder of a model."""
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    model = dcp_job.build()
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    state = {"app": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def faults(source: Path, folder: Path, capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What is wrong with how a file that means harm is refused."""
    capfd.readouterr()
    target = folder / "target"
    code, grown = measured(lambda: main(["convert", str(source), str(target), *words]))
    told = capfd.readouterr()
    said = told.err + told.out
    files = [path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file()]
    size = sum(path.stat().st_blocks * 512 for path in files)
    pickles = sum(path.stat().st_size for path in files if path.name == ".metadata" or path.suffix == ".pt")
    most = TIMES_FILES * size + TIMES_PICKLES * min(pickles, size) + BESIDE
    found = [] if code == 2 and "needed: " in said and "do: " in said else [f"ended with {code}: {said}"]
    found += [f"took {grown:,} bytes, {most:,} are allowed"] if grown > most else []
    found += ["control characters"] if any(not c.isprintable() and c != "\n" for c in said) else []
    return found + (["left something"] if target.exists() else [])


@pytest.mark.parametrize("name", bombs.QUICK["torch.save"])
def test_a_file_that_means_harm(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = bombs.files(100)[name](tmp_path / "x.pt")
    assert not faults(source, tmp_path, capfd)


@pytest.mark.parametrize("name", split(bombs.DCP, bombs.QUICK["dcp"]))
def test_a_dcp_folder_that_means_harm(
    name: str, sharded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not faults(bombs.dcp(tmp_path / "x", sharded, bombs.DCP[name]), tmp_path, capfd)


@pytest.fixture
def zero(tmp_path: Path, as_deepspeed: None) -> Callable[[int], Path]:  # noqa: F811
    """DeepSpeed's folder of a stage."""

    def make(stage: int) -> Path:
        model = dcp_job.build()
        optimizer = adam(model)
        trained(model, optimizer, range(1))
        zero_files(tmp_path / f"zero{stage}", stage, 2, model, optimizer)
        return tmp_path / f"zero{stage}"

    return make


@pytest.mark.parametrize("names", [bombs.QUICK["deepspeed"], pytest.param(bombs.DEEPSPEED, marks=pytest.mark.long)])
def test_deepspeed_folders_that_mean_harm(
    names: Iterable[str], zero: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sources, wrong = {stage: zero(stage) for stage in (2, 3)}, {}
    for number, name in enumerate(names):
        stage, change = bombs.DEEPSPEED[name]
        source = bombs.deepspeed(tmp_path / f"x{number}", sources[stage], change)
        found = faults(source, tmp_path, capfd)
        if found:
            wrong[name] = found
    assert not wrong


@pytest.mark.parametrize(
    ("name", "holds"), [("expanded tensors", "hold_tensors"), ("a text encoded many times", "hold")]
)
def test_without_the_count_memory_is_taken(
    name: str, holds: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: memory that is not counted is seen to be taken."""
    monkeypatch.setattr(foreign.Room, holds, lambda *_: None)
    source = bombs.files(60 if holds == "hold_tensors" else 20)[name](tmp_path / "x.pt")
    assert any("took " in fault for fault in faults(source, tmp_path, capfd))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [300, 2000])
@pytest.mark.parametrize("to", ["checkpoint", "hf", "safetensors"])
def test_files_that_mean_harm(size: int, to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for number, (name, make) in enumerate(bombs.files(size).items()):
        found = faults(make(tmp_path / f"x{number}.pt"), tmp_path, capfd, "--to", to)
        found = [fault for fault in found if to == "checkpoint" or "took" in fault or "characters" in fault]
        if found:
            wrong[name] = found
    assert not wrong


# Terminals.


def test_names_are_printed_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "w\x1b]0;owned\x07\x1b[2J\r\u202e"
    torch.save({"model": {bad: torch.zeros(2), f"{bad}2": 3}, bad: {1, 2}}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "no"), "--tie", f"{bad}=nothing"]) == 2
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "hf", "--model", "7"]) == 2
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "hf"]) == 0
    for words in (["ls"], ["show"], ["show", "--all"], ["verify"]):
        assert main(["checkpoint", words[0], str(tmp_path / "ours"), *words[1:]]) == 0
    dt.distribute(nn.Linear(2, 2))
    with pytest.raises(dt.CheckpointError) as error:
        dt.load(tmp_path / "ours")
    told = capsys.readouterr()
    said = told.out + told.err + str(error.value)
    assert "w?]0;owned??[2J??" in said
    assert [c for c in said if not c.isprintable() and c != "\n"] == []


def test_errors_hold_no_control_characters() -> None:
    assert explain("a\x1b[2Jb\nc", "d\x07", "e\tf") == "ab\nc\n  needed: d\\x07\n  do: e\tf"


def test_a_long_name_does_not_widen_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dt.distribute(nn.Linear(2, 2))
    file = Path(dt.save(tmp_path).path) / "checkpoint.json"
    content = json.loads(file.read_text())["checkpoint"]
    content["tensors"] = {("k" * 100_000 if "weight" in key else key): one for key, one in content["tensors"].items()}
    content["run"]["models"][0]["state"]["weight"] = {"$tensor": "k" * 100_000}
    file.write_bytes(written(content))
    assert main(["checkpoint", "show", str(tmp_path), "--all"]) == 0
    assert sum(len(line) > 10_000 for line in capsys.readouterr().out.splitlines()) <= 3
