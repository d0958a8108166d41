"""What is closed to all after a block: listeners of others than Python that it has opened, and no others."""

from __future__ import annotations

import resource
import socket

import pytest

from distributedtorch.core import listeners


def takes(listener):
    with socket.socket() as one:
        one.settimeout(0.1)
        return one.connect_ex(listener.getsockname()) == 0


@pytest.fixture
def servers():
    """Listeners on loopback, as gloo opens them or as Python does."""
    made = []

    def server(gloo):
        made.append(socket.create_server(("127.0.0.1", 0)))
        made[-1].set_inheritable(gloo)
        return made[-1]

    yield server
    for one in made:
        one.close()


def test_only_what_the_block_has_opened_is_closed(servers):
    before = servers(True)
    with listeners.sealed():
        mine, theirs = servers(True), servers(False)
        assert takes(mine)
        kept = socket.create_connection(mine.getsockname())
    assert [takes(one) for one in (before, mine, theirs)] == [True, False, True]
    inside = mine.accept()[0]  # the one of above
    inside = mine.accept()[0]
    kept.sendall(b"x")
    assert inside.recv(1) == b"x", "connections that stand go on"
    inside.close()
    kept.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_is_closed_where_ranks_connect_later(servers, monkeypatch, lazy):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1" if lazy else "0")
    with listeners.sealed(also_nccl=not lazy):
        mine = servers(True)
    assert takes(mine)


def test_the_soft_limit_of_files_is_raised(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    for soft, hard in ((1024, 4096), (1024, 1 << 20), (1 << 17, 1 << 20), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=(soft, hard): limits)
        listeners.allow_many_files()
    assert asked == [(4096, 4096), (1 << 16, 1 << 20)]
