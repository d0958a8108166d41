"""Where ranks of mpirun and srun meet: loopback on one host, one named address across hosts, never all interfaces."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import address
from distributedtorch.launch.place import Place


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def place(rank, *, world=2, local=2, launcher="mpirun"):
    return Place(
        rank=rank, world=world, local_rank=rank, local_world=local, launcher=launcher, run_folder=None, job="job-1"
    )


def test_on_one_host_rank_0_leaves_a_loopback_port_for_the_others(tmp_path):
    found = []
    other = threading.Thread(target=lambda: found.append(address._look(address._folder(place(1)), 10)))
    other.start()
    with address.settle(place(0), 10) as listener:
        other.join(10)
        assert listener.getsockname() == ("127.0.0.1", found[0])
    (folder,) = tmp_path.iterdir()
    assert "job-1" in folder.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "port").stat().st_mode) == 0o600
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    address.forget(place(1))
    assert folder.exists()
    address.forget(place(0))
    assert not folder.exists()


def test_what_an_ended_process_left_is_not_taken():
    code = (
        "from pathlib import Path; from distributedtorch.launch import address; import sys;"
        "address._leave(Path(sys.argv[1]), 5)"
    )
    folder = address._folder(place(0))
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
    assert (folder / "port").exists()
    with pytest.raises(LaunchError, match=r"after 0.1 s rank 0 had not left its port") as refused:
        address.settle(place(1), 0.1)
    assert "do: " in str(refused.value)
    with address.settle(place(0), 1) as listener:
        assert address._look(folder, 1) == listener.getsockname()[1]


def test_a_folder_that_others_can_write_to_is_refused():
    folder = address._folder(place(0))
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match="not this user's alone"):
        address.settle(place(0), 1)
    (folder / "port").write_text("{}")
    with pytest.raises(LaunchError, match="had not left its port"):
        address.settle(place(1), 0.05)


@pytest.mark.parametrize(
    ("environ", "launcher", "words"),
    [
        ({}, "mpirun", "several hosts, and no MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1"}, "mpirun", "several hosts, and no MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "mpirun", "loopback"),
        ({"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"}, "mpirun", "has no address here"),
        ({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "70000"}, "mpirun", "MASTER_PORT='70000'"),
        ({"SLURM_STEP_NODELIST": "localhost,b"}, "srun", "loopback"),
        (
            {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"},
            "mpirun",
            "192.0.2.1 is no address of this host",
        ),
    ],
)
def test_across_hosts_one_reachable_address_is_needed(monkeypatch, environ, launcher, words):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="do: ") as refused:
        address.settle(place(0, world=4, launcher=launcher), 1)
    assert words in str(refused.value)


def test_the_interface_of_an_address_is_named():
    assert address.interface_to("127.0.0.1") == "lo"


def test_a_given_port_in_use_is_refused_with_its_owner(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(LaunchError, match=f"in use by process {os.getpid()}"):
            address.settle(place(0), 1)
