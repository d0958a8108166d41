"""`dt.launch`: the value, the first error, a killed rank, what is refused, and that nothing is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import distributedtorch as dt
from distributedtorch.core import plain
from distributedtorch.distribute import release
from tests.launch.train import train


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A folder of its own, a process without a run, and afterwards no child more than before."""
    release()
    monkeypatch.chdir(tmp_path)
    before = _children()
    yield
    assert not multiprocessing.active_children()
    assert _children() == before


def _children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _alive(group):
    """The processes of a group, zombies not counted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat] if int(pgrp) == group and state != "Z" else []
    return found


def test_the_value_of_rank_0_comes_back_and_its_output_too(capsys):
    secret = object()  # cannot be pickled in any useful way: the function is not

    def work(factor):
        assert secret is not None
        print("hello from", dt.rank())
        total = dt.total(float(dt.rank() + 1))
        return {"total": total * factor, 3: (torch.arange(3), [None, True, "text"])}

    value = dt.launch(work, 10, workers=2)
    assert value["total"] == 30.0
    assert torch.equal(value[3][0], torch.arange(3))
    assert value[3][1] == [None, True, "text"]
    assert capsys.readouterr().out == "hello from 0\n"
    (log,) = Path(".dtorch").glob("*/rank1.log")
    assert log.read_text() == "hello from 1\n"


def test_it_trains_to_the_weights_of_one_process_after_the_caller_has_computed(tmp_path, capsys):
    weight = torch.randn(300, 300).requires_grad_()
    optimizer = torch.optim.AdamW([weight])
    weight.mm(torch.randn(300, 300)).sum().backward()  # wakes OpenMP's threads
    optimizer.step()
    loss = dt.launch(train, str(tmp_path / "two"), workers=2, plan="zero2")
    said = capsys.readouterr().err
    assert "2 workers (dt.launch) · plan zero2 (dt.launch)" in said
    one = dt.launch(train, str(tmp_path / "one"), workers=1)
    assert loss == pytest.approx(one)
    two, one = load_file(tmp_path / "two"), load_file(tmp_path / "one")
    assert all(torch.allclose(two[name], one[name], rtol=1e-10, atol=1e-12) for name in one)
    assert not Path(".dtorch").exists()


def test_the_first_error_is_raised_with_its_rank_and_traceback(capsys):
    def fails_in_one():
        if dt.rank() == 1:
            raise ValueError("a bad sample")
        dt.barrier()

    with pytest.raises(dt.RankError, match="rank 1 failed first: ValueError: a bad sample") as raised:
        dt.launch(fails_in_one, workers=2)
    assert (raised.value.rank, raised.value.kind) == (1, "ValueError")
    assert "in fails_in_one" in str(raised.value)
    assert "Traceback" not in capsys.readouterr().err


def test_a_killed_rank_is_named_and_its_data_workers_go_too(tmp_path):
    def killed():
        batches = iter(DataLoader(list(range(100)), num_workers=1))
        next(batches)
        (tmp_path / f"group.{dt.rank()}").write_text(str(os.getpgid(0)))
        dt.barrier()
        if dt.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dt.barrier()

    began = time.monotonic()
    with pytest.raises(dt.RankError, match="rank 1 failed first: was killed by SIGKILL"):
        dt.launch(killed, workers=2)
    assert time.monotonic() - began < 15
    groups = [int((tmp_path / f"group.{rank}").read_text()) for rank in range(2)]
    while any(map(_alive, groups)):
        assert time.monotonic() - began < 15


def test_a_code_is_an_error_and_an_earlier_one_of_the_caller_is_not():
    sys.last_value = ValueError("of an earlier cell")
    try:
        assert dt.launch(lambda: dt.total(1), workers=2) == 2
    finally:
        del sys.last_value
    with pytest.raises(dt.RankError, match="rank 0 failed first: exited with code 3"):
        dt.launch(lambda: sys.exit(3), workers=1)


def test_descriptors_are_given_back():
    dt.launch(dt.barrier, workers=2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        dt.launch(dt.barrier, workers=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_plain_is_said_and_left_out(capsys):
    assert dt.launch(lambda: {"model": torch.nn.Linear(1, 1)}, workers=1) is None
    assert "rank 0 returned a Linear, which is not plain data" in capsys.readouterr().err


def test_ctrl_c_ends_all_and_reaches_the_caller(tmp_path):
    def forever():
        if dt.rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        dt.launch(forever, workers=2)


def test_what_cannot_be_forked_is_refused(monkeypatch):
    def refused(words, workers=2, **options):
        with pytest.raises(dt.LaunchError, match=words) as error:
            dt.launch(print, workers=workers, **options)
        assert "needed: " in str(error.value) and "do: " in str(error.value)

    refused("workers=0", workers=0)
    with pytest.raises(dt.PlanError, match="no-such-word"):
        dt.launch(print, workers=2, plan="no-such-word")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        refused("dt.launch on darwin")
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        refused("after CUDA was initialised")
    with monkeypatch.context() as patch:
        patch.setattr("torch.backends.cuda.is_built", lambda: True)
        assert dt.launch(dt.world, workers=1) == 1
        patch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
        refused("PYTORCH_NVML_BASED_CUDA_CHECK")
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        refused(r"in rank 0 of 2 \(torchrun\)")
    dt.distribute(torch.nn.Linear(1, 1))
    refused("after dt.distribute")
    release()
    thread = threading.Thread(target=refused, args=("in a thread",))
    thread.start()
    thread.join()


def test_workers_in_an_interactive_python_name_it(tmp_path):
    code = "import torch, distributedtorch as dt\ndt.distribute(torch.nn.Linear(1, 1), workers=2)\n"
    done = subprocess.run([sys.executable, "-i"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert "dt.launch(function, workers=2)" in done.stderr


def test_plain_data_survives_and_the_rest_is_named(tmp_path):
    shared = torch.ones(2, 2, dtype=torch.bfloat16)
    value = {"a": [1, 2.5, None, "x"], (1, 2): (shared, shared.T), True: {}}
    plain.write(tmp_path / "value", value)
    back = plain.read(tmp_path / "value")
    assert back.keys() == value.keys()
    assert back["a"] == value["a"]
    assert torch.equal(back[1, 2][1], shared.T) and back[1, 2][0].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="a set"):
        plain.write(tmp_path / "other", [{1}])
    assert not (tmp_path / "other").exists()
