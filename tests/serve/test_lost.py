"""Ends of a line whose other end is gone without a word: both notice."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from distributedtorch.core.errors import PeerError, UsageError
from distributedtorch.serve import channel, rates
from distributedtorch.serve.board import Refused
from distributedtorch.serve.channel import Doors, Kind, Line, keys
from distributedtorch.serve.desk import Desk
from distributedtorch.serve.parcel import Item
from distributedtorch.serve.post import Post
from distributedtorch.serve.shard import Shard
from distributedtorch.serve.terms import Terms


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Desk, Line]:
    """A server and its worker, who have met."""
    monkeypatch.setattr(channel, "_SECONDS_ALONE", 0.5)
    monkeypatch.setattr(channel, "_SECONDS_TO_ANSWER", 0.5)
    desk, (line,) = opened(torch.optim.SGD, 1)
    line.say(Kind.PULL)
    assert line.hear().version == 0
    return desk, line


def opened(kind: Callable[..., torch.optim.Optimizer], workers: int, **how: Any) -> tuple[Desk, list[Line]]:
    """A server of its own and lines of its workers."""
    param = nn.Parameter(torch.zeros(3))
    shard = Shard([param], kind([param], lr=0.1), [Item(param)], Terms(where="apart"), workers)
    pairs, theirs = [keys() for _ in range(workers)], keys()
    doors = Doors("127.0.0.1", theirs, {pair[0]: rank for rank, pair in enumerate(pairs)}, shard.most)
    desk = Desk(shard, doors, staleness=None, ahead=None, **how)
    where = f"tcp://127.0.0.1:{doors.port}"
    return desk, [Line(rank, where, pair, theirs[0]) for rank, pair in enumerate(pairs)]


@contextlib.contextmanager
def working(kind: Callable[..., torch.optim.Optimizer], workers: int) -> Iterator[tuple[Desk, list[Post]]]:
    """A server that serves well to the end, and its workers."""
    desk, lines = opened(kind, workers)
    yield desk, [Post(line, desk.shard.items, None) for line in lines]
    for line in lines:
        line.say(Kind.BYE)
        line.part()
        line.close()
    desk.close()
    assert desk.failed is None


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


@pytest.mark.timeout(30)
def test_a_stopped_server_is_out_of_reach(ends: tuple[Desk, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    desk, line = ends
    said: list[str] = []
    line.tell = said.append
    monkeypatch.setattr(channel, "_SECONDS_TO_REPORT", 0.1)
    line.say(Kind.BYE)
    desk.close()
    line.socket.linger = 0
    with socket.create_server(("127.0.0.1", desk.doors.port)):  # takes connections, as a stopped process's kernel does
        line.say(Kind.PULL)
        with pytest.raises(PeerError, match=r"server 0 at tcp.*has been out of reach for 0.5 s"):
            line.hear()
    assert len(said) == 1 and "has not answered rank 0 for" in said[0] and "there is no connection" in said[0]
    line.close()


@pytest.mark.timeout(30)
def test_a_server_to_which_nobody_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SECONDS_TO_COME", 0.3)
    desk, (line,) = opened(torch.optim.SGD, 1)
    line.close()
    desk.close()
    assert isinstance(desk.failed, PeerError) and "no worker has come to this server" in str(desk.failed)


@pytest.mark.timeout(30)
def test_a_server_that_hears_nobody_any_more_says_so_once() -> None:
    said: list[Exception] = []
    desk, (line,) = opened(torch.optim.SGD, 1, on_failure=said.append)

    def hear(_: int) -> None:
        raise OSError("no socket")

    desk.doors.hear = hear  # type: ignore[method-assign,assignment]
    desk.thread.join(10)
    assert not desk.thread.is_alive() and [str(error) for error in said] == ["no socket"]
    line.close()
    desk.close()


@pytest.mark.timeout(30)
def test_a_goodbye_is_answered_also_when_it_comes_again(ends: tuple[Desk, Line]) -> None:
    desk, line = ends
    desk.doors.workers[b"another"] = 1  # who has not left yet
    for _ in range(2):
        line.say(Kind.BYE)
        assert line.hear().kind is Kind.STATE
    desk.gone.add(1)
    desk.close()
    assert desk.failed is None
    line.close()


class Own(torch.optim.SGD):
    """Keeps an object of its own."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["own"] = object()
        return super().step(closure)


@pytest.mark.timeout(30)
def test_state_that_cannot_travel_is_refused_and_the_server_goes_on() -> None:
    with working(Own, 1) as (desk, (post,)):
        post.ask()
        post.take([torch.zeros(3)])
        post.bring(1, [torch.ones(3)], rates.numbers(desk.shard.user))
        post.take([torch.zeros(3)])
        with pytest.raises(UsageError, match=r"cannot give its optimizer's state: .*keeps a object"):
            post.whole()
        post.bring(2, [torch.ones(3)], rates.numbers(desk.shard.user))
        post.take([place := torch.zeros(3)])
        assert torch.allclose(place, torch.full((3,), -0.2))


@pytest.mark.timeout(30)
def test_what_fills_a_server() -> None:
    with working(torch.optim.AdamW, 2) as (desk, (first, second)):
        master = desk.shard.masters[0]
        state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
        options = [{**rates.plain(desk.shard.user)[0], "amsgrad": True, "lr": 0.5}]
        first.fill({"values": [torch.ones(3)], "states": [state], "options": options})
        assert desk.shard.user.param_groups[0]["amsgrad"] and desk.shard.user.param_groups[0]["lr"] == 0.5
        values = {"values": [torch.full((3,), 2.0)], "states": None, "options": None}
        first.fill(values)
        assert master.tolist() == [2.0] * 3 and desk.shard.optimizer.state[master]["step"] == 3
        with pytest.raises(UsageError, match="worker 1 says FILL"):
            second.fill(values)
        with pytest.raises(UsageError, match="does not take"):
            first.fill({**values, "values": [torch.zeros(4)]})
        for total in (-1, 0, 1 << 40):
            first.line.say(Kind.FILL, total, torch.zeros(8, dtype=torch.uint8), held=0)
            with pytest.raises(Refused, match="bytes for a server"):
                first.line.hear()
        assert master.tolist() == [2.0] * 3
