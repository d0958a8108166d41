"""Where ranks that others start meet: a folder on one host, one named address across hosts, never all interfaces."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import address, folder
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


@pytest.fixture
def met(monkeypatch):
    """Ends what ranks hold of the folders they have met in; calls of `meet` within the test."""
    kept = []
    monkeypatch.setattr(address.atexit, "register", lambda *call: kept.append(call))
    monkeypatch.setenv(folder.VARIABLE, "")

    def meet(*args):
        assert address.meet(*args)
        return Path(os.environ[folder.VARIABLE])

    yield meet
    for leave, *words in kept:
        leave(*words)


def test_on_one_host_rank_0_makes_a_folder_and_leaves_its_name_for_the_others(tmp_path, met):
    found = []
    other = threading.Thread(target=lambda: found.append(address._look(address._folder(place(1)), 10)))
    other.start()
    path = met(place(0), 10)
    other.join(10)
    assert found[0][0] == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    note = address._folder(place(0))
    assert "job-1" in note.name and note.parent == tmp_path
    assert stat.S_IMODE(note.stat().st_mode) == 0o700
    assert stat.S_IMODE((note / "note").stat().st_mode) == 0o600
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    address.forget(place(1))
    assert note.exists()
    address.forget(place(0))
    assert not note.exists()
    folder.leave(*found[0])
    assert path.exists(), "rank 0 is still there"


def test_what_an_ended_process_left_is_not_taken(met):
    code = (
        "from pathlib import Path; from distributedtorch.launch import address; import sys;"
        "address._leave(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    note, (path, held) = address._folder(place(0)), folder.make()
    subprocess.run([sys.executable, "-c", code, str(note), str(path)], check=True, timeout=60)
    assert (note / "note").exists()
    with pytest.raises(LaunchError, match=r"after 0.1 s rank 0 had not left its note") as refused:
        address.meet(place(1), 0.1)
    assert "do: " in str(refused.value)
    folder.leave(path, held)
    path = met(place(0), 1)
    again, held = address._look(note, 1)
    assert again == path
    os.close(held)


def test_a_folder_that_others_can_write_to_is_refused():
    note = address._folder(place(0))
    note.mkdir()
    note.chmod(0o777)
    with pytest.raises(LaunchError, match="not this user's alone"):
        address.meet(place(0), 1)
    (note / "note").write_text("{}")
    with pytest.raises(LaunchError, match="had not left its note"):
        address.meet(place(1), 0.05)


def test_only_a_starter_that_says_so_has_all_ranks_on_one_host(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert not address.meet(place(0, local=1), 1)
    assert not address.meet(place(0, launcher="torchrun"), 1), "RANK and WORLD_SIZE alone may mean several hosts"


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
        address.settle(place(0, world=4, launcher=launcher))
    assert words in str(refused.value)


def test_the_interface_of_an_address_is_named():
    assert address.interface_to("127.0.0.1") == "lo"


def test_a_given_port_in_use_is_refused_with_its_owner(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(LaunchError, match=f"in use by process {os.getpid()}"):
            address.settle(place(0))
