"""Ends of a line whose other end is gone without a word: both notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributedtorch.core.errors import PeerError
from distributedtorch.serve import channel
from distributedtorch.serve.channel import Doors, Kind, Line, keys
from distributedtorch.serve.desk import Desk
from distributedtorch.serve.parcel import Item
from distributedtorch.serve.shard import Shard
from distributedtorch.serve.terms import Terms


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Desk, Line]:
    """A server and its worker, who have met."""
    monkeypatch.setattr(channel, "_SECONDS_ALONE", 0.5)
    monkeypatch.setattr(channel, "_SECONDS_TO_ANSWER", 0.5)
    param = nn.Parameter(torch.zeros(3))
    shard = Shard([param], torch.optim.SGD([param], lr=0.1), [Item(param)], Terms(where="apart"), 1)
    mine, theirs = keys(), keys()
    doors = Doors("127.0.0.1", theirs, {mine[0]: 0}, shard.most)
    desk = Desk(shard, doors, staleness=None, ahead=None)
    line = Line(0, f"tcp://127.0.0.1:{doors.port}", mine, theirs[0])
    line.say(Kind.PULL)
    assert line.hear().version == 0
    return desk, line


@pytest.mark.timeout(30)
def test_a_server_without_workers_ends(ends: tuple[Desk, Line]) -> None:
    desk, line = ends
    desk.thread.join(1.5)
    assert desk.thread.is_alive(), "a worker that says nothing for long is there"
    line.close()
    desk.close()
    assert isinstance(desk.failed, PeerError) and "no worker has been connected" in str(desk.failed)


@pytest.mark.timeout(30)
def test_a_worker_without_a_server_ends(ends: tuple[Desk, Line]) -> None:
    desk, line = ends
    line.say(Kind.BYE)
    desk.close()
    assert desk.failed is None
    line.say(Kind.PULL)
    with pytest.raises(PeerError, match="out of reach"):
        line.hear()
    line.close()
