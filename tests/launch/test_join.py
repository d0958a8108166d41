"""Who is missing, who is double, and a world that torchrun started."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import join, place, secret

JOB = Path(__file__).with_name("job.py")


@pytest.fixture
def store(monkeypatch):
    """A store on loopback, and the environment of rank 0 of 2 that points to it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return server


def rank_0_of_2():
    return place.Place(rank=0, world=2, local_rank=0, local_world=2, launcher="dtorch", run_folder=None)


def test_a_missing_rank_is_named(store):
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"after 0.3 s rank 0 of 2 had joined; missing: rank 1"):
        join.join(rank_0_of_2(), device_type="cpu", timeout_seconds=0.3)
    assert time.monotonic() - began < 2


def test_a_number_given_twice_is_found_on_both_sides(store):
    code = (
        "from distributedtorch.launch import join, place\n"
        "join.join(place.Place(rank=0, world=2, local_rank=0, local_world=2, launcher='dtorch', run_folder=None),"
        " device_type='cpu', timeout_seconds=60)"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    client = join.client()
    while not client.check(["joined/0"]):
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="two processes have joined as rank 0 of 2"):
        join.join(rank_0_of_2(), device_type="cpu", timeout_seconds=10)
    assert time.monotonic() - began < 2
    assert "two processes have joined as rank 0 of 2" in first.communicate(timeout=60)[1]
    assert first.returncode == 1


def test_with_a_secret_nobody_else_speaks_for_the_job(store, monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "a secret of the job's")
    mine = join.client()
    for key in ("distributedtorch/0/watch/verdict", "watch/verdict"):
        store.set(key, "all is over")
    assert not mine.check(["watch/verdict"])
    mine.set("watch/verdict", "true")
    assert join.client().get("watch/verdict") == b"true" and join.client().compare_set("new", "", "1") == b"1"
    for key in store.list_keys():
        store.set(key, "all is over")
    with pytest.raises(LaunchError, match="someone else has written it"):
        mine.get("watch/verdict")
    monkeypatch.delenv(secret.VARIABLE)
    assert join.client().get("watch/verdict") == b"all is over"


@pytest.mark.parametrize("options", [["--standalone"], ["--master-addr", "127.0.0.1", "--master-port", "0"]])
def test_torchruns_world_is_joined(start, options):
    if "0" in options:
        options = [*options[:-1], str(_free_port())]
    run = start("-m", "torch.distributed.run", *options, "--nproc-per-node", 2, JOB, "none", 0)
    assert run.end() == 0, run.err
    assert "running" in run.out
    assert run.gone_within(2)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_the_backend_is_nccl_only_with_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert join._backend(rank_0_of_2(), "cuda") == "gloo"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert join._backend(rank_0_of_2(), "cuda") == "cpu:gloo,cuda:nccl"
    assert join._backend(rank_0_of_2(), "cpu") == "gloo"
