"""The documents' faces: their program at 1 and 2 workers, plans that change on the same objects, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch import facade
from distributedtorch.distribute import release
from distributedtorch.launch.join import let_main_first
from distributedtorch.launch.place import Place
from distributedtorch.launch.ranks import AFTER_MAIN
from distributedtorch.launch.script import downloads
from distributedtorch.score.batch import forward
from tests import forked
from tests.conformance.cases import difference
from tests.mistakes import faces
from tests.mistakes.test_mistakes import rows, wrong

ROOT = Path(__file__).parents[1]
LISTING = ROOT / "examples" / "listing.py"
TINY = ("--epochs", 1, "--samples", 64, "--test-samples", 32, "--width", 4)
DTORCH = ("-m", "distributedtorch", "run", "--workers", 2)


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, command)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)


# The documents' program.


@pytest.fixture(scope="module")
def resnet() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resnet", LISTING.with_name("resnet.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm(tensors: Iterator[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


def test_the_listing_trains_alike_with_one_and_two_workers(resnet: ModuleType, tmp_path: Path) -> None:
    one = run(tmp_path, LISTING, *TINY, "--weights", "one")
    two = run(tmp_path, LISTING, *TINY, "--weights", "two", "--workers", 2)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert one.stdout == two.stdout
    assert one.stdout.startswith("ddp epoch 1 done\nzero epoch 1 done\nTest Accuracy: ")
    assert [line for line in two.stderr.splitlines() if "2 workers (call) · plan zero3" in line]
    assert two.stderr.count("batch 32 global = 16 + 16 (the loader that feeds the loop)") == 2
    torch.manual_seed(0)
    start = dict(resnet.ResNet18(4).named_parameters())
    truth, found = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    moved = norm(truth[name] - start[name].detach() for name in start)
    assert norm(found[name] - truth[name] for name in start) < 5e-3 * moved
    buffers = [{name: value for name, value in state.items() if name not in start} for state in (truth, found)]
    assert difference(*buffers)[0] < 1e-2


@pytest.mark.long  # the default suite has it in tests/mistakes
@pytest.mark.parametrize("launch", [(), DTORCH], ids=["one process", "dtorch run"])
def test_the_listing_as_printed_names_the_missing_backward(launch: tuple[object, ...], tmp_path: Path) -> None:
    ended = run(tmp_path, *launch, LISTING, *TINY, "--as-printed")
    assert ended.returncode == 1
    assert ended.stdout == "ddp epoch 1 done\n"
    assert "UsageError: optimizer.step() with no gradient" in ended.stderr
    assert "do: compute the loss and call loss.backward() before optimizer.step()" in ended.stderr


def test_images_of_a_folder(resnet: ModuleType, tmp_path: Path) -> None:
    row = bytes([7]) + bytes(3071 * [0]) + bytes([255])
    (tmp_path / "data_batch_1.bin").write_bytes(3 * row)
    images = resnet.images("train", 2, tmp_path)
    assert len(images) == 2
    image, label = images[1]
    assert (image.shape, int(label), float(image[0, 0, 0]), float(image[2, 31, 31])) == ((3, 32, 32), 7, -2.0, 2.0)
    with pytest.raises(SystemExit, match="no CIFAR-10"):
        resnet.images("test", 2, tmp_path)


def test_generated_classes_can_be_learned(resnet: ModuleType) -> None:
    x, y = resnet.images("train", 500, None).tensors
    unseen, labels = resnet.images("test", 100, None).tensors
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    assert float((torch.cdist(unseen.flatten(1), means.flatten(1)).argmin(1) == labels).float().mean()) > 0.9


# Plans that change on the same objects.


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("release/sgd", "release/adafactor", "facade/sgd", "facade/adamw", "saving/sgd")),
        pytest.param(3, ("release/adamw", "facade/sgd", "facade/adamw"), marks=pytest.mark.long),
    ],
)
def test_one_uninterrupted_run(world: int, names: tuple[str, ...], tmp_path: Path) -> None:
    looked_at(tmp_path, names, forked.run(world, "tests.facade_job", str(tmp_path), *names, cwd=tmp_path))


def looked_at(folder: Path, names: tuple[str, ...], ended: subprocess.CompletedProcess[str]) -> None:
    """What every rank has said, checked."""
    assert ended.returncode == 0, ended.stderr
    world = len(list(folder.glob("said.*")))
    for rank in range(world):
        said = json.loads((folder / f"said.{rank}").read_text())
        assert list(said) == list(names)
        for name, result in said.items():
            assert result["gap"] < 1e-9, (name, result["where"])
            CHECKS[name.split("/")[0]](result["found"], rank, world)


def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    names = ("topk/sgd", "turns/none")
    words = ("0,0,1,1", "tests.facade_job", str(tmp_path), *names)
    ended = forked.run(4, "tests.hosts", *words, cwd=tmp_path)
    looked_at(tmp_path, names, ended)
    assert "wire dense inside 2 hosts, codes across" in ended.stderr


def check_release(found: list[dict[str, int]], rank: int, world: int) -> None:
    """Nothing of the library is left on the objects, whatever the plan was."""
    assert len(found) == 4 and all(not any(marks.values()) for marks in found)


def check_facade(found: list[dict[str, int]], rank: int, world: int) -> None:
    """Hooks are not doubled; the loader is divided in training only, and where one is named, only that one."""
    first, *others, last, seen, after, named = found
    assert first == last and first["gradient hooks"] > 0 and first["members"] == 1
    assert all(marks["members"] == 1 and marks["gradient hooks"] == first["gradient hooks"] for marks in others)
    mine = {2: [4, 3], 3: [3, 2, 2]}[world][rank]
    assert seen == {"training": mine, "no_grad": 7, "eval": 7}
    assert after == {"after the barrier": 7}
    assert named == {"named": mine, "not named": 7}


def check_topk(found: list[dict[str, int]], rank: int, world: int) -> None:
    """Bit for bit what the plan gives, and something was left out."""
    assert found == [{"as planned": 1, "as one process": 0}]


def check_turns(found: list[dict[str, int]], rank: int, world: int) -> None:
    """Rank 0, then the first rank of the other host, then the others."""
    assert found[0]["place"] in ({0: [0], 2: [1]}.get(rank, [2, 3]))


def check_saving(found: list[dict[str, int]], rank: int, world: int) -> None:
    assert found == [{"steps since": 0}]


CHECKS = {
    "release": check_release,
    "facade": check_facade,
    "topk": check_topk,
    "turns": check_turns,
    "saving": check_saving,
}


# One process.


@pytest.fixture
def objects() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]]:
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    yield model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    release()
    facade._FACE.__init__()  # type: ignore[misc]


def test_launch_before_setup_is_refused() -> None:
    with pytest.raises(dt.UsageError, match=r"launch\(\) before setup\(\)"):
        dt.DistributedPyTorch().launch()


def test_a_step_before_launch_is_refused(objects: Any) -> None:
    model, optimizer, _ = objects
    dist = dt.DistributedPyTorch()
    dist.setup(model, optimizer)
    dist.setup(model, optimizer)
    with pytest.raises(dt.UsageError, match=r"before launch\(\)"):
        optimizer.step()
    dist.launch()
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    release()
    assert "step" not in vars(optimizer)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_after_setup_does_not_complain(objects: Any) -> None:
    model, optimizer, _ = objects
    dist = dt.DistributedPyTorch()
    dist.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    dist.launch()
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_device_without_index_is_this_ranks_own(objects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    monkeypatch.setattr(objects[0], "to", moved.append)
    monkeypatch.setattr(facade, "accelerator", lambda: "cuda")
    monkeypatch.setattr(facade, "device", lambda: torch.device("cuda", 3))
    for given in ("cuda", "cuda:0", "cpu"):
        dt.DistributedPyTorch().setup(*objects[:2], given)
    assert moved == [torch.device("cuda:3"), torch.device("cuda:0")]


@pytest.mark.parametrize("strategy", ["ddp", "ddp,accumulate=2"])
def test_a_step_without_gradient_is_refused(objects: Any, strategy: str) -> None:
    model, optimizer, loader = objects
    dist = dt.DistributedPyTorch(strategy)
    dist.setup(model, optimizer)
    dist.launch()
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(dt.UsageError, match=r"call loss\.backward\(\)"):
        optimizer.step()


def test_a_step_without_gradient_is_torchs_own_matter_elsewhere(objects: Any) -> None:
    model, optimizer, _ = objects
    dt.distribute(model, optimizer, plan="clip=1.0")
    optimizer.step()


def test_the_exception_on_its_way_is_raised_by_join(objects: Any) -> None:
    dist = dt.DistributedPyTorch()
    dist.setup(*objects[:2])
    try:
        raise KeyError("handled before")
    except KeyError:
        dist.launch()
        dist.join()
    with pytest.raises(ZeroDivisionError):
        try:
            dist.launch()
            raise ZeroDivisionError
        finally:
            dist.join()


def test_a_later_number_of_workers_is_refused(objects: Any) -> None:
    dist = dt.DistributedPyTorch()
    dist.setup(*objects[:2])
    dist.launch()
    with pytest.raises(dt.LaunchError, match="workers=2 in a later setup"):
        dt.DistributedPyTorch("zero", workers=2).setup(*objects[:2])


def test_two_pairs_are_kept_apart(objects: Any) -> None:
    model, optimizer, _ = objects
    other = nn.Linear(2, 2)
    theirs = torch.optim.AdamW(other.parameters())
    for dist, pair in ((dt.DistributedPyTorch("clip=1.0"), objects[:2]), (dt.DistributedPyTorch(), (other, theirs))):
        dist.setup(*pair)
        dist.launch()
    dt.DistributedPyTorch("clip=2.0").setup(other, theirs)
    assert [setup.model for setup in facade._FACE.attached] == [model, other]
    assert "step" in vars(optimizer) and "step" in vars(theirs)


@pytest.mark.parametrize(
    "loader", [[torch.zeros(4, 4)], type("Own", (DataLoader,), {"__iter__": lambda _: iter(())})([])]
)
def test_a_loader_that_cannot_be_met_is_refused(objects: Any, loader: Any) -> None:
    with pytest.raises(dt.UsageError, match="iterates in its own way"):
        dt.DistributedPyTorch().setup(*objects[:2], loader=loader)


def test_a_strategy_needs_its_scope() -> None:
    with pytest.raises(dt.UsageError, match="mirrored or server or topk"):
        dt.Strategy("other")
    strategy = dt.Strategy()
    with pytest.raises(dt.UsageError, match=r"run\(\) before scope\(\)"):
        strategy.run(print)
    with strategy.scope():
        nn.Linear(2, 2)
    with pytest.raises(dt.UsageError, match="for which no optimizer is known"):
        strategy.run(print)


@pytest.mark.parametrize("kind", dt.Strategy.KINDS)
def test_a_strategy_starts_its_workers_at_its_scope(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def restart(workers: int) -> None:
        raise Started(workers)

    monkeypatch.setattr(sys.modules["distributedtorch.distribute"], "restart", restart)
    strategy = dt.Strategy(kind, workers=4)
    with pytest.raises(Started, match="4"), strategy.scope():
        pytest.fail("the block began in the process that only starts others")


@pytest.fixture
def strategy() -> Iterator[dt.Strategy]:
    yield dt.Strategy()
    release()


def test_what_run_returns_in_one_process(strategy: dt.Strategy) -> None:
    model = nn.Linear(4, 2)
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return {"loss": loss, "half": loss.bfloat16(), "rows": model(x), "count": len(x), "float": loss.item()}

        found = strategy.run(step, (torch.ones(8, 4),))
    assert float(found["loss"]) == found["loss"].item() == float(found["loss"].numpy()) == found["float"]
    assert float(found["half"].numpy()) == pytest.approx(found["float"], rel=1e-2)
    assert found["rows"].shape == (8, 2) and found["count"] == 8
    assert torch.optim.Optimizer.__init__.__module__ == "torch.optim.optimizer"


def test_evaluation_moves_batches_of_the_host_to_the_model() -> None:
    output, target = forward(nn.Linear(4, 2, device="meta"), (torch.ones(3, 4), torch.ones(3)))
    assert output.is_meta and target.is_meta
    with pytest.raises(dt.UsageError, match="the model is on cpu, the data on meta"):
        forward(nn.Linear(4, 2), (torch.ones(3, 4, device="meta"), torch.ones(3)))


# The documents' programs, at 1 and 4 ranks too (at 2 and 3: tests/mistakes).

PROGRAMS = [*faces.PROGRAMS[:1], *faces.PROGRAMS[4:5], *faces.LISTINGS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 4])
def test_programs_at(world: int, tmp_path: Path) -> None:
    table = {script.name: script for script in PROGRAMS}
    found = rows(world, tmp_path, "ddp", *table)
    assert sorted(row["name"] for row in found) == sorted([*table] * world)
    faults = [(row["name"], fault) for row in found if (fault := wrong(table[row["name"]], row))]
    assert not faults


# Downloads.

DOWNLOADS = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from distributedtorch import DistributedPyTorch, accuracy


class Images(Dataset):
    def __init__(self, root, train, download=False):
        file = Path(root) / ("train" if train else "test")
        Path(root).mkdir(exist_ok=True)
        if download and not file.exists():
            with open("downloads", "a") as log, file.open("w") as out:
                print(file.name, file=log)
                for number in range(40):
                    print(number, file=out, flush=True)
                    time.sleep(0.005)
        self.rows = [int(line) for line in file.read_text().split()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return torch.tensor([row % 3, row % 5, 1.0]) / 3, row % 3


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_loader = DataLoader(Images("data", train=True, download=True), batch_size=16, shuffle=True)
test_loader = DataLoader(Images("data", train=False, download=True), batch_size=16)
torch.manual_seed(0)
model = nn.Linear(3, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.CrossEntropyLoss()

dist = DistributedPyTorch()
dist.setup(model, optimizer, device)
for epoch in range(4):
    dist.launch()
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    dist.barrier()
    dist.join()
print(f"Test Accuracy: {100 * accuracy(model, test_loader):.2f}%")
"""


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_printed_program_downloads_once(world: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DOWNLOADS)
    ended = run(tmp_path, "-m", "distributedtorch", "run", "--workers", world, "--plan", "zero", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "downloads").read_text() == "train\ntest\n"
    assert "dtorch: train.py:32 downloads: rank 0 runs alone" in ended.stderr
    assert f"{world} workers (command line) · plan zero3 (command line)" in ended.stderr
    assert ended.stdout == "Test Accuracy: 72.50%\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\nx = Images('data', download=True)", "train.py:2"),
        ("def main():\n    return Images(download=True)", "train.py:2"),
        ("with dt.main_first():\n    x = Images(download=True)", ""),
        ("with main_first(), lock('data') as held:\n    if True:\n        x = Images(download=True)", ""),
        ("x = Images(download=False), Images(download=wanted), download(True)", ""),
        ("this is no Python", ""),
    ],
)
def test_where_a_script_downloads(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    assert downloads(str(tmp_path / "train.py")) == line
    assert downloads(str(tmp_path / "missing.py")) == ""


def test_others_wait_until_rank_0_meets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process group of the script's own too."""
    made: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", made.append)
    first, second = (
        Place(rank=k, world=2, local_rank=k, local_world=2, launcher="dtorch", run_folder=tmp_path) for k in (0, 1)
    )
    let_main_first(second)  # nothing was asked for
    monkeypatch.setenv(AFTER_MAIN, "train.py:1")
    waits = threading.Thread(target=let_main_first, args=(second,), daemon=True)
    waits.start()
    while AFTER_MAIN in os.environ:
        waits.join(0.001)
    monkeypatch.setenv(AFTER_MAIN, "train.py:1")
    let_main_first(first)
    assert waits.is_alive() and AFTER_MAIN not in os.environ
    torch.distributed.init_process_group("gloo")
    waits.join(10)
    assert made == ["gloo"] and not waits.is_alive()


# Ranks that end.

ENDS = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import distributedtorch as dt

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
dist = dt.DistributedPyTorch()
dist.setup(model, optimizer)
try:
    dist.launch()
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
    if dt.rank() == 1:
        time.sleep(1)
        raise KeyError("lost on the way")
finally:
    try:
        dist.join()
    except BaseException as error:
        if dt.rank() == 0:
            print(type(error).__name__, error)
        raise
"""


def test_join_raises_the_first_exception(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    ended = run(tmp_path, *DTORCH, "train.py")
    assert ended.returncode == 1
    assert ended.stdout == "PeerError rank 1 raised KeyError: 'lost on the way' (at train.py:20)\n"
    assert "dtorch: rank 1 failed first: KeyError: 'lost on the way'" in ended.stderr
