"""The face of a divided loader: attributes, notes, fingerprints, refusals, and workers that die with their rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from data_ranks import Flow, Numbers, PythonShuffle, fresh, join, keep, loader_of
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from distributedtorch.core.errors import UsageError
from distributedtorch.data.loader import divide


def test_attributes_pass_through() -> None:
    class ByEpoch(PythonShuffle):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([(i + self.epoch) % self.length for i in range(self.length)])

    user = DataLoader(Numbers(6), batch_size=2, sampler=ByEpoch(6), collate_fn=keep)
    loader = join(lambda: user, 1, 2).loader
    assert loader.dataset is user.dataset and loader.batch_size == 2 and len(loader) == 3
    loader.sampler.set_epoch(3)
    assert list(loader) == [[4], [0], [2]]
    loader.collate_fn = sum
    assert user.collate_fn is sum and list(loader) == [4, 0, 2], "what is set on the loader holds from the next epoch"
    with pytest.raises(AttributeError):
        _ = loader.nothing
    with pytest.raises(ValueError, match="should not be set"):
        loader.dataset = 3


def test_len_without_length() -> None:
    class Batches:
        def __iter__(self) -> Any:
            return iter([[0], [1]])

    loader = join(lambda: DataLoader(Numbers(2), batch_sampler=Batches()), 0, 2).loader
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == 2


def test_on_batch_comes_before_the_batch() -> None:
    seen: list[Any] = []
    loader = divide(
        loader_of(4, 2)(), rank=0, world=2, stream=None, on_batch=lambda share, batch: seen.append((share.batch, batch))
    )
    for number, batch in enumerate(loader):
        assert seen[-1] == (number, batch)


def test_notes() -> None:
    assert join(loader_of(64, 32), 0, 2).loader.note == "32 global = 16 + 16"
    assert join(loader_of(64, 32), 0, 1).loader.note == "32 global"
    ordered = join(loader_of(64, 32, num_workers=1, in_order=False), 0, 2).loader
    assert "in_order=False set to True" in ordered.note
    custom = join(lambda: DataLoader(Numbers(2), batch_sampler=[[0], [1]]), 0, 2).loader
    assert custom.note == "batches of list divided over 2" and custom.batch_global is None


def test_fingerprint_tells_loaders_apart() -> None:
    def of(make: Any, **options: Any) -> dict[str, Any]:
        return join(make, 0, 2, **options).loader.fingerprint()

    same = of(loader_of(8, shuffle=True))
    assert same == of(loader_of(8, shuffle=True))
    assert all(isinstance(value, str | int) for value in same.values())
    others = [
        of(loader_of(9, shuffle=True)),
        of(loader_of(8)),
        of(loader_of(8, batch=5, shuffle=True)),
        of(loader_of(8, shuffle=True), batch=3),
        of(loader_of(8, shuffle=True, drop_last=True)),
        of(loader_of(8, shuffle=True, generator=torch.Generator().manual_seed(1))),
        of(loader_of(8, shuffle=True, generator=torch.Generator().manual_seed(2))),
        of(lambda: DataLoader(Flow(8), batch_size=4)),
        of(lambda: [torch.zeros(4)]),
    ]
    assert len({str(found) for found in [same, *others]}) == 10


class Shards(Sampler[int]):
    world_size, rank = 2, 0


class Split:
    _distributed = "set by split_dataset_by_node"

    def __len__(self) -> int:
        return 4


def split_by_node(shards: Any) -> Any:
    return shards


class Web(Flow):
    def __init__(self) -> None:
        super().__init__(4)
        self.pipeline = [Flow(4), split_by_node]


REFUSED = {
    "already divides the data": [
        loader_of(8, sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0)),
        loader_of(8, sampler=Shards()),
        lambda: DataLoader(
            Numbers(8), batch_sampler=BatchSampler(DistributedSampler(Numbers(8), num_replicas=2, rank=0), 2, False)
        ),
    ],
    "already divides itself": [
        lambda: DataLoader(Split()),
        lambda: DataLoader(torch.utils.data.Subset(Split(), [0])),
        lambda: DataLoader(Web()),
        lambda: DataLoader(IterableWrapper(range(4)), batch_size=2),
    ],
    "batch_size=None": [lambda: DataLoader(Numbers(8), batch_size=None), lambda: DataLoader(Flow(8), batch_size=None)],
    "given as loader": [lambda: 3],
}


@pytest.mark.parametrize(("text", "make"), [(text, make) for text, makes in REFUSED.items() for make in makes])
def test_refused_in_three_parts(text: str, make: Any) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        join(make, 0, 2)
    assert "\n  needed: " in str(caught.value) and "\n  do: " in str(caught.value)


def test_refused_again_and_rebatched() -> None:
    loader = join(loader_of(8), 0, 2).loader
    with pytest.raises(UsageError, match="given again"):
        join(lambda: loader, 0, 2)
    for batch in (0, -1, 2.0, True):
        with pytest.raises(UsageError, match="at least 1"):
            join(loader_of(8), 0, 2, batch=batch)
    for make in (lambda: [torch.zeros(2)], lambda: DataLoader(Numbers(2), batch_sampler=[[0], [1]])):
        with pytest.raises(UsageError, match="batches are made by list"):
            join(make, 0, 2, batch=2)


def test_what_looks_like_a_refusal_but_is_not() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=1, rank=0, shuffle=False)
    assert list(join(loader_of(8, sampler=sampler), 0, 1).loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(join(loader_of(4, sampler=SequentialSampler(Numbers(4))), 0, 2).loader) == [[0, 1]]


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index in (4, 5):
            raise OSError("broken file")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_batch_does_not_shift_the_sizes(workers: int) -> None:
    rank = join(lambda: DataLoader(Broken(9), batch_size=4, collate_fn=keep, num_workers=workers), 0, 2)
    walk = iter(rank.loader)
    assert next(walk) == [0, 1]
    with pytest.raises(OSError, match="broken file"):
        next(walk)
    assert next(walk) == [8]
    assert [share.rows_global for share in rank.shares] == [4, 1]


def note_worker(folder: str, worker: int) -> None:
    Path(folder, f"{os.getpid()}").write_text(str(worker))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from functools import partial
from data_ranks import loader_of
from test_loader import note_worker
from distributedtorch.data.loader import divide
if __name__ == "__main__":
    make = loader_of(40, num_workers=2, worker_init_fn=partial(note_worker, sys.argv[2]))
    loader = make()
    if sys.argv[3] == "divided":
        loader = divide(loader, rank=0, world=2, stream=None, on_batch=lambda share, batch: None)
    walk = iter(loader)
    for _ in range(4):  # from both workers
        next(walk)
    print("ready", flush=True)
    time.sleep(60)
"""


def seconds_to_die(folder: Path, kind: str) -> float:
    """Kill -9 a process that has two data workers, and wait until both are gone (at most two seconds)."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SCRIPT, here, str(folder), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            workers = [int(path.name) for path in folder.iterdir()]
            assert len(workers) == 2 and all(map(alive, workers)), "the user's worker_init_fn ran in both"
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait()
        start = time.monotonic()
        while any(map(alive, workers)) and time.monotonic() - start < 2:
            time.sleep(0.01)
        return time.monotonic() - start


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_workers_die_with_a_killed_rank(tmp_path: Path) -> None:
    assert seconds_to_die(tmp_path, "divided") < 1


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_workers_of_an_untouched_loader_outlive_it(tmp_path: Path) -> None:
    """The twin: without our start the workers stay for seconds, so the test above can fail."""
    assert seconds_to_die(tmp_path, "untouched") >= 2


def test_spawned_workers_get_the_wrapped_start(tmp_path: Path) -> None:
    start = partial(note_worker, str(tmp_path))
    fresh()
    rank = join(loader_of(8, num_workers=1, worker_init_fn=start, multiprocessing_context="spawn"), 1, 2)
    assert list(rank.loader) == [[2, 3], [6, 7]]
    assert len(list(tmp_path.iterdir())) == 1
