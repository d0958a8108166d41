"""The folder in which ranks meet behaves as torch's stores do; nobody else can use it, and nothing of it is left."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import folder, secret
from distributedtorch.launch.folder import Folder


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "_bases", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def path(base):
    with folder.meeting() as path:
        yield path


def tcp():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def said(store):
    """What a store answers to calls as the library makes them."""
    yield store.check(["a"]), store.check([])
    store.set("a", "one")
    yield store.get("a"), store.check(["a"]), store.check(["a", "b"])
    yield store.add("n", 2), store.add("n", 0), store.add("n", -3), store.add("m", 0), store.check(["m"])
    yield store.compare_set("c", "", "1"), store.compare_set("c", "", "2"), store.compare_set("c", "1", "3")
    yield store.compare_set("d", "was", "is"), store.check(["d"]), store.get("c")
    yield store.multi_get(["c", "a"]), store.delete_key("c"), store.delete_key("c"), store.check(["c"])
    store.set("ä\n/..", "ö" * 10_000)
    yield store.get("ä\n/..")
    store.set_timeout(timedelta(seconds=0.05))
    store.wait(["a", "n"])
    with pytest.raises(RuntimeError):
        store.get("never")


def test_it_answers_as_torchs_store_does(path):
    truth = list(said(tcp()))
    assert list(said(Folder(path))) == truth
    assert list(said(secret.Keyed(tcp(), b"x" * 16))) == truth


def test_prefixes_are_apart_and_a_value_is_waited_for(path):
    one, other = Folder(path, "one", 10), Folder(path, "other", 10)
    one.set("key", "1")
    assert not other.check(["key"])
    late = threading.Timer(0.05, other.set, ("key", "2"))
    late.start()
    assert other.get("key") == b"2"
    late.join()


def _count(path):
    store = Folder(path)
    for _ in range(50):
        store.add("n", 1)
        store.compare_set("last", "", str(os.getpid()))


def test_many_processes_count_right(path):
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=_count, args=(path,)) for _ in range(3)]
    threads = [threading.Thread(target=_count, args=(path,)) for _ in range(2)]
    for one in [*others, *threads]:
        one.start()
    for one in [*others, *threads]:
        one.join()
    assert Folder(path).add("n", 0) == 5 * 50


@pytest.mark.parametrize("broken", [False, True])
def test_who_changes_something_waits_for_who_does_so_already(path, monkeypatch, broken):
    """And where nobody takes turns, that is seen."""
    if broken:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    store = Folder(path)
    other = threading.Thread(target=store.add, args=("n", 1))
    with store._alone():
        other.start()
        other.join(5 if broken else 0.1)
        assert other.is_alive() != broken
    other.join()


def test_a_process_forked_meanwhile_does_not_keep_the_lock(path):
    store = Folder(path, timeout_seconds=5)
    with store._alone():
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        assert store.add("n", 1) == 1
    finally:
        os.close(write)
        os.waitpid(child, 0)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_can_enter_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(LaunchError, match="not this user's alone"):
        Folder(path)


def test_a_link_to_a_folder_is_refused(path, base):
    (base / "link").symlink_to(path)
    with pytest.raises(LaunchError, match="not this user's alone"):
        Folder(base / "link")


def test_a_folder_that_is_gone_is_told_at_once(path):
    store = Folder(path, timeout_seconds=60)
    path.rename(path.with_name("elsewhere"))
    for call in (lambda: store.get("a"), lambda: store.set("a", ""), lambda: store.add("a", 1)):
        with pytest.raises(LaunchError, match="do: look at "):
            call()


def test_the_last_to_leave_removes_it():
    path, held = folder.make()
    also = folder.hold(path)
    Folder(path).set("a", "1")
    folder.leave(path, held)
    assert Folder(path).get("a") == b"1"
    folder.leave(path, also)
    assert not path.exists() and folder.hold(path) is None


def test_what_a_killed_job_left_goes_at_the_next_start(base):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        path, _ = folder.make()
        Folder(path).set("a", "1")
        os.write(write, str(path).encode())
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    left = Path(os.read(read, 4096).decode())
    (base / f"{folder._prefix()}file").touch()
    (base / "distributedtorch-else").mkdir(mode=0o700)
    assert left.exists()
    with folder.meeting() as path, folder.meeting() as second:
        assert not left.exists() and path.exists() and second.exists()
    assert {entry.name for entry in base.iterdir()} == {f"{folder._prefix()}file", "distributedtorch-else"}


def test_file_systems_of_other_hosts_come_last(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(folder, "_is_far", lambda base: base == Path("/tmp"))
    assert folder._bases()[-1] == Path("/tmp")
    assert not folder._is_far(Path("/dev/shm"))


@pytest.mark.parametrize("write", ["another value", "0" * 64 + "another value", ""])
def test_what_someone_else_wrote_is_refused_with_the_jobs_secret(write):
    below = tcp()
    store = secret.Keyed(below, b"x" * 16)
    store.set("key", "a")
    store.set("other", "b")
    below.set(store._name("key"), write or below.get(store._name("other")).decode())
    with pytest.raises(LaunchError, match="is not of this job"):
        store.get("key")
    assert not below.check(["key"]) and store.get("other") == b"b"
    assert not secret.Keyed(below, b"y" * 16).check(["other"])


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(LaunchError, match="of 5 characters") as refused:
        secret.given()
    assert "openssl" in str(refused.value) and "short" not in str(refused.value)
