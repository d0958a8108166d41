"""What is left to other jobs: memory and devices, in real processes where this machine has them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import reserve
from tests import forked
from tests.launch.conftest import Run

JOB = "tests.launch.reserve_job"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU; what one test asks for is not there for the next."""
    monkeypatch.setenv(reserve._VISIBLE, "")
    for name in (reserve.RESERVE, reserve._HIDDEN):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before, hook = resource.getrlimit(resource.RLIMIT_DATA), sys.excepthook
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)
    sys.excepthook = hook
    reserve._limited.clear()


def leave(gib_each: float, ranks: int) -> str:
    """A request that leaves each of so many ranks so much."""
    return f"memory={(reserve._host_memory() - int(gib_each * ranks * GIB)) >> 20}MiB"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_gets_an_error_before_it_takes_what_is_reserved(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, JOB, "2048", cwd=tmp_path, environ={reserve.RESERVE: leave(1.5, world)})
    assert ended.returncode == 1 and "step 1" in ended.stdout and "step 7" not in ended.stdout
    said = ended.stdout + ended.stderr
    assert "allocate" in said and f"{reserve.RESERVE}: " in said and "1.5 GiB for each rank" in said


@pytest.mark.long
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
    assert "rank 1 failed first" in run.err and f"  {reserve.RESERVE}: " in run.err
    run = start(*words, "memory=all", "train.py")
    assert run.end() != 0 and "'memory=all' as what to leave to other jobs" in run.err


@pytest.mark.parametrize(
    "text", ["memory", "memory=8", "memory=-1GiB", "memory=0GiB", "devices=0", "devices=1,devices=1", "cores=1", "8GiB"]
)
def test_requests_that_say_something_else(text: str) -> None:
    with pytest.raises(LaunchError, match=r"as what to leave to other jobs\n  needed"):
        reserve.parse(text)


def test_requests() -> None:
    assert reserve.parse("") == reserve.Reserve()
    assert reserve.parse("devices=2, memory=1.5GiB") == reserve.Reserve(devices=2, memory=3 * GIB // 2)


CPU = torch.device("cpu")


def test_too_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reserve.RESERVE, leave(0.1, 2))
    with pytest.raises(LaunchError, match=r"0\.1 GiB for each of 2 ranks\n  needed: for each \d\.\d GiB: .* mapped"):
        reserve.keep({CPU}, Comm(0, 1), 2)


def test_a_limit_that_is_there_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = reserve._mapped() + GIB
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    monkeypatch.setenv(reserve.RESERVE, leave(8.0, 1))
    reserve.keep({CPU}, Comm(0, 1), 1)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == soft
    assert f"{soft / GIB:.1f} GiB for each rank" in reserve.spoken()


def test_the_smallest_limit_of_all_control_groups_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal:       25165824 kB\nMemFree: 1 kB",
        "/proc/self/cgroup": "4:cpu,memory:/a/b\n0::/slurm/job/step",
        "/sys/fs/cgroup/slurm/job/step/memory.max": "max",
        "/sys/fs/cgroup/slurm/job/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(6 * GIB),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 63),
    }

    def read(self: Path) -> str:
        if str(self) not in files:
            raise FileNotFoundError(self)
        return files[str(self)]

    monkeypatch.setattr(Path, "read_text", read)
    assert reserve._host_memory() == 6 * GIB
    del files["/sys/fs/cgroup/memory/a/memory.limit_in_bytes"]
    assert reserve._host_memory() == 8 * GIB


def gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, counted: int | None = None) -> None:
    """A host of four GPUs, of which so many are counted by CUDA, those that are visible where none is said."""
    monkeypatch.setenv(reserve._VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(reserve._VISIBLE)
    count = lambda: len(os.environ.get(reserve._VISIBLE, "0,1,2,3").split(","))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.accelerator, "device_count", count if counted is None else lambda: counted)


@pytest.mark.parametrize(
    ("visible", "asked", "left"),
    [(None, 1, "0,1,2"), ("3,5,7,1", 3, "3"), ("GPU-a,GPU-b,GPU-c,GPU-d", 2, "GPU-a,GPU-b")],
)
def test_devices_are_hidden_once(visible: str | None, asked: int, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, visible)
    monkeypatch.setenv(reserve.RESERVE, f"devices={asked}")
    for _ in range(2):  # as in a process that this one starts
        reserve.hide_devices()
        assert os.environ[reserve._VISIBLE] == left
    assert reserve.spoken() == f"{asked} of 4 GPUs left to others"
    reserve.keep({CPU}, Comm(0, 1), 1)
    first = left.split(",", maxsplit=1)[0]
    monkeypatch.setenv(reserve._VISIBLE, first)  # a process that is given one of them
    reserve.hide_devices()
    assert os.environ[reserve._VISIBLE] == first and "of 4" in reserve.spoken()


def test_another_request_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, None)
    for asked, left in (("devices=1", "0,1,2"), ("devices=2", "0")):
        monkeypatch.setenv(reserve.RESERVE, asked)
        reserve.hide_devices()
        assert os.environ[reserve._VISIBLE] == left
    assert reserve.spoken() == "2 of 3 GPUs left to others"
    monkeypatch.setenv(reserve.RESERVE, "memory=1GiB")
    with pytest.raises(LaunchError, match="for a model on xpu"):
        reserve.keep({torch.device("xpu", 0)}, Comm(0, 1), 1)


def test_no_device_would_be_left_or_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "0,1", counted=2)
    monkeypatch.setenv(reserve.RESERVE, "devices=2")
    with pytest.raises(LaunchError, match="devices=2 on a host where 2 GPUs are visible"):
        reserve.hide_devices()
    monkeypatch.setenv(reserve.RESERVE, "devices=1")
    with pytest.raises(LaunchError, match="set after distributedtorch was imported"):
        reserve.keep({CPU}, Comm(0, 1), 1)
    reserve.hide_devices()
    with pytest.raises(LaunchError, match="or start with CUDA_VISIBLE_DEVICES=0"):  # CUDA still sees both
        reserve.keep({CPU}, Comm(0, 1), 1)


@pytest.mark.parametrize(
    ("others", "each"),
    [([], 64), (["uuid-9", "uuid-8"], 64), (["uuid-0", "uuid-9"], 32), (["uuid-0 uuid-1", "uuid-0", "uuid-0"], 16)],
)
def test_ranks_of_a_gpu_divide_it(others: list[str], each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the GPU is, not by its number: each rank may see one GPU only, and call it 0."""
    set_to: list[tuple[float, torch.device]] = []
    for name, value in {
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid-{device.index}"),
        "mem_get_info": lambda _: (10 * GIB, 80 * GIB),
        "set_per_process_memory_fraction": lambda *given: set_to.append(given),
        "get_per_process_memory_fraction": lambda device: 0.9 if device.index == 0 else 0.1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    comm = Comm(0, 1 + len(others))
    monkeypatch.setattr(comm, "bytes_of_all", lambda name, mine: [mine, *(one.encode() for one in others)])
    monkeypatch.setenv(reserve.RESERVE, "memory=16GiB")
    device = torch.device("cuda", 0)
    reserve.keep({device}, comm, 4)
    assert set_to == [(each / 80, device)]
    assert reserve.spoken() == f"16.0 GiB of cuda:0 left to others, {each}.0 GiB for each rank"
    reserve.keep({device, torch.device("cuda", 1)}, comm, 4)  # a later call, with one that was not there before
    assert set_to[1:] == [(0.1, torch.device("cuda", 1))]
