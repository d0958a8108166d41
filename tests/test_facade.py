"""The documents' faces: their program at 1 and 2 workers, plans that change on the same objects, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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
from tests.conformance.cases import difference

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


@pytest.mark.parametrize(
    "launch", [pytest.param((), marks=pytest.mark.long), DTORCH], ids=["one process", "dtorch run"]
)
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
        (2, ("release/sgd", "release/adafactor", "facade/sgd", "facade/adamw", "strategy/sgd", "saving/sgd")),
        pytest.param(3, ("release/adamw", "facade/sgd", "facade/adamw"), marks=pytest.mark.long),
    ],
)
def test_one_uninterrupted_run(world: int, names: tuple[str, ...], tmp_path: Path) -> None:
    command = ("-m", "distributedtorch", "run", "--workers", world, "-m", "tests.facade_job", tmp_path, *names)
    ended = run(tmp_path, *command)
    assert ended.returncode == 0, ended.stderr
    for rank in range(world):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        assert list(said) == list(names)
        for name, result in said.items():
            assert result["gap"] < 1e-9, (name, result["where"])
            CHECKS[name.split("/")[0]](result["found"], rank, world)


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


def check_strategy(found: list[dict[str, int]], rank: int, world: int) -> None:
    assert found == [{"first": [4, 3][rank], "last": [2, 1][rank]}]


def check_saving(found: list[dict[str, int]], rank: int, world: int) -> None:
    assert found == [{"steps since": 0}]


CHECKS = {
    "release": check_release,
    "facade": check_facade,
    "strategy": check_strategy,
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


@pytest.mark.parametrize("kind", ["server", "topk"])
def test_a_strategy_of_another_kind(kind: str) -> None:
    assert kind in str(dt.Strategy(kind).plan)


def test_a_strategy_needs_its_scope() -> None:
    with pytest.raises(dt.UsageError, match="mirrored or server or topk"):
        dt.Strategy("other")
    strategy = dt.Strategy()
    with pytest.raises(dt.UsageError, match=r"run\(\) before scope\(\)"):
        strategy.run(print)
    with pytest.raises(dt.UsageError, match="made 1 models and 0 optimizers"), strategy.scope():
        nn.Linear(2, 2)


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
