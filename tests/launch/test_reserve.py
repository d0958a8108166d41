"""What is left to other jobs: memory and devices, in real processes where this machine has them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import reserve
from distributedtorch.launch.place import find
from tests import forked
from tests.launch.conftest import Run

JOB = "tests.launch.reserve_job"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test asks for is not there for the next."""
    for name in (reserve.RESERVE, reserve._HIDDEN, reserve._VISIBLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before, hook = resource.getrlimit(resource.RLIMIT_DATA), reserve.sys.excepthook
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)
    reserve.sys.excepthook, reserve._held.said = hook, ""


def leave(gib_each: float, ranks: int) -> str:
    """A request that leaves each of so many ranks so much."""
    return f"memory={(reserve._host_memory() - int(gib_each * ranks * GIB)) >> 20}MiB"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_gets_an_error_before_it_takes_what_is_reserved(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, JOB, "2048", cwd=tmp_path, environ={reserve.RESERVE: leave(1.5, world)})
    assert ended.returncode == 1 and "step 1" in ended.stdout and "step 7" not in ended.stdout
    said = ended.stdout + ended.stderr
    assert "allocate" in said and f"{reserve.RESERVE}: " in said and "1.5 GiB for each rank" in said


@pytest.mark.timeout(100)
def test_within_its_part_a_job_runs_and_says_what_it_leaves(tmp_path: Path) -> None:
    ended = forked.run(2, JOB, "512", cwd=tmp_path, environ={reserve.RESERVE: leave(1.5, 2)})
    assert ended.returncode == 0 and "step 7" in ended.stdout, ended.stderr
    assert "of the host left to others, 1.5 GiB for each rank" in ended.stderr


@pytest.mark.timeout(100)
def test_without_a_limit_the_same_job_takes_it(tmp_path: Path) -> None:
    """The twin of the first test: it is the limit that stops the rank there."""
    ended = forked.run(2, JOB, "2048", cwd=tmp_path)
    assert ended.returncode == 0 and "step 7" in ended.stdout, ended.stderr


@pytest.mark.timeout(100)
def test_the_command(start: Callable[..., Run]) -> None:
    words = ("-m", "distributedtorch", "run", "--workers", 2, "--reserve")
    run = start(*words, leave(1.0, 2), Path(__file__).with_name("reserve_job.py"), 4096)
    assert run.end() == 1
    assert "rank 1 failed first" in run.err and f"\n  {reserve.RESERVE}: " in run.err
    run = start(*words, "memory=all", "train.py")
    assert run.end() != 0 and "'memory=all' in DISTRIBUTEDTORCH_RESERVE" in run.err


@pytest.mark.parametrize(
    "text", ["memory", "memory=8", "memory=-1GiB", "memory=0GiB", "devices=0", "devices=1,devices=1", "cores=1", "8GiB"]
)
def test_requests_that_say_something_else(text: str) -> None:
    with pytest.raises(LaunchError, match=r"in DISTRIBUTEDTORCH_RESERVE\n  needed"):
        reserve.parse(text)


def test_requests() -> None:
    assert reserve.parse("") == reserve.Reserve()
    assert reserve.parse("devices=2, memory=1.5GiB") == reserve.Reserve(devices=2, memory=3 * GIB // 2)


def test_too_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reserve.RESERVE, leave(0.1, 2))
    with pytest.raises(LaunchError, match=r"0\.1 GiB for each of 2 ranks\n  needed: for each at least 0\.\d GiB"):
        reserve.limit_memory(replace(find(), local_world=2))


@pytest.mark.parametrize(
    ("visible", "asked", "left"),
    [(None, 1, "0,1,2"), ("3,5,7,1", 3, "3"), ("GPU-a,GPU-b,GPU-c,GPU-d", 2, "GPU-a,GPU-b")],
)
def test_devices_are_hidden_once(visible: str | None, asked: int, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible:
        monkeypatch.setenv(reserve._VISIBLE, visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ.get(reserve._VISIBLE, "0,1,2,3").split(",")))
    monkeypatch.setenv(reserve.RESERVE, f"devices={asked}")
    for _ in range(2):  # as in a process that this one starts
        reserve.hide_devices()
        assert os.environ[reserve._VISIBLE] == left
    assert reserve.spoken() == f"{asked} of 4 GPUs left to others"


def test_no_device_would_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(reserve.RESERVE, "devices=2")
    with pytest.raises(LaunchError, match="devices=2 on a host where 2 GPUs are visible"):
        reserve.hide_devices()
    monkeypatch.setenv(reserve.RESERVE, "devices=1")
    with pytest.raises(LaunchError, match="or start with CUDA_VISIBLE_DEVICES=0"):  # the count does not follow
        reserve.hide_devices()


@pytest.mark.parametrize(("device", "ranks", "each"), [(0, 2, 64), (1, 3, 64), (0, 3, 32), (0, 1, 64)])
def test_ranks_of_a_gpu_divide_it(device: int, ranks: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[float, int]] = []
    for name, value in {
        "current_device": lambda: device,
        "device_count": lambda: 2,
        "mem_get_info": lambda _: (10 * GIB, 80 * GIB),
        "set_per_process_memory_fraction": lambda *given: set_to.append(given),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    reserve._limit_gpu(16 * GIB, replace(find(), local_world=ranks))
    assert set_to == [(each / 80, device)]
    assert reserve.spoken() == f"16.0 GiB of each GPU left to others, {each}.0 GiB for each rank"
