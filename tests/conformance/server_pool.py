"""What each process of a pool runs: parameter servers beside ddp, and beside their own history played again by hand.

`-m tests.conformance.server_pool FOLDER [SABOTAGE]`: faults raise.
"""

from __future__ import annotations

import atexit
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.serve.board import Board, Event, Refused
from distributedtorch.serve.channel import Kind, Line, keys
from distributedtorch.sync.server import Server
from tests.conformance.loops import rows
from tests.conformance.loose_pool import EPOCHS, adam, compare, distributed, net
from tests.serve.history import staleness

STEPS = 30


def served() -> Server:
    sync = here().loop.members[0].sync
    assert isinstance(sync, Server)
    return sync


def rounds() -> None:
    """Without staleness it is ddp."""
    for plan in ("server(staleness=0)", "server(staleness=0,servers=2)", "server(ahead=0,staleness=0),accumulate=2"):
        window = 2 if "accumulate" in plan else 1
        truth = by_hand_ddp(window)
        compare(plan, truth, distributed(net(), adam, plan))
        release()


def by_hand_ddp(window: int) -> list[Tensor]:
    """One process on whole batches."""
    model = net()
    optimizer = adam(model)
    for _ in range(EPOCHS):
        batches = list(rows())
        for start in range(0, len(batches), window):
            together = batches[start : start + window]
            total = sum(len(x) for x, _ in together)
            for x, y in together:
                (F.mse_loss(model(x), y) * len(x) / total).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def rows_of(step: int, worker: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def train(plan: str) -> tuple[list[Tensor], list[Event]]:
    """Workers at different speeds; the parameters at the end, and the server's history on rank 0."""
    model = net()
    model, optimizer = dt.distribute(model, adam(model), plan=plan)
    events: list[Event] = []
    desk = served().desk
    if desk is not None:
        desk.board.note = events.append
    dt.barrier()
    draw = random.Random(dt.rank())
    for step in range(1, STEPS + 1):
        loss_of(model, rows_of(step, dt.rank())).backward()
        time.sleep(draw.random() * 0.004 * (1 + dt.rank()))
        optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    return [p.detach().clone() for p in model.parameters()], events


def again(events: list[Event]) -> list[Tensor]:
    """The same history in one process."""
    model = net()
    optimizer = adam(model)
    pulled: dict[int, list[Tensor]] = {}
    used: dict[int, list[Tensor]] = {}
    for event in events:
        if event.kind == "pull":
            pulled[event.worker] = [p.detach().clone() for p in model.parameters()]
        elif event.kind == "push":
            used[event.worker] = pulled.pop(event.worker)
        elif event.kind == "apply":
            there = net()
            for param, value in zip(there.parameters(), used[event.worker], strict=True):
                param.data.copy_(value)
            loss_of(there, rows_of(event.step, event.worker)).backward()
            for param, other in zip(model.parameters(), there.parameters(), strict=True):
                param.grad = other.grad
            optimizer.step()
        elif event.kind == "leave":
            pulled.pop(event.worker, None)
    return [p.detach() for p in model.parameters()]


def histories() -> None:
    for bound in (1, 3, None):
        plan = "server" if bound is None else f"server(staleness={bound})"
        found, events = train(plan)
        flat = here().comm.exchange("found", torch.cat([t.view(-1) for t in found]))
        assert (flat == flat[0]).all(), f"{plan}: dt.sync leaves workers with different parameters"
        if dt.rank() == 0:
            late = staleness(events)
            assert len(late) == STEPS * dt.world()
            assert bound is None or max(late) <= bound, f"{plan}: a push of staleness {max(late)}"
            compare(plan, again(events), found)
            assert dt.stats().backlog == 0
        release()


def saved(folder: Path) -> None:
    plan = "server(staleness=0,servers=2)"
    model = net()
    model, optimizer = dt.distribute(model, adam(model), plan=plan)

    def step(number: int) -> None:
        loss_of(model, rows_of(number, dt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    dt.save(folder / "served")
    for number in range(3, 6):
        step(number)
    truth = [p.detach().clone() for p in model.parameters()]
    dt.load(folder / "served")
    for number in range(3, 6):
        step(number)
    compare("dt.load", truth, list(model.parameters()))
    whole = optimizer.state_dict()["state"]
    assert len(whole) == 4 and all("exp_avg" in one for one in whole.values())
    release()


def refused() -> None:
    """What is wrong is refused in words, and the others go on."""
    model = net()
    model, optimizer = dt.distribute(model, adam(model), plan="server")
    for step in range(4):
        loss = loss_of(model, rows_of(step, dt.rank()))
        if step == 2 and dt.rank() == 1:
            (loss * float("nan")).backward()
            with pytest.raises(dt.UsageError, match=r"rank 1: the gradient of .* has NaN"):
                optimizer.step()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    dt.barrier()
    desk = served().desk
    if desk is not None:
        assert desk.board.version == 4 * dt.world() - 1
        where = served().lines[0].where
        stranger = Line(0, where, keys(), served().lines[0].server)
        stranger.say(Kind.PULL)
        assert not stranger.socket.poll(500), "a stranger was answered"
        stranger.close()
        ours = served().lines[0].socket
        ours.send_multipart([b"rubbish"])
        assert b"not a message" in ours.recv_multipart()[1]
        served().lines[0].say(Kind.PUSH, 99, torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(Refused, match="another model"):
            served().lines[0].hear()
        assert desk.doors.refused == 1 and desk.board.version == 4 * dt.world() - 1
    dt.barrier()
    release()


def last(folder: Path) -> None:
    """Rank 0 comes to its end first, and its server goes on for the others; what it sends is long, so not copied."""
    model = nn.Linear(128, 128)
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), plan="server")
    if dt.is_main():
        atexit.register((folder / "ending").touch)
    for step in range(2 if dt.is_main() else 40):
        while step == 2 and not (folder / "ending").exists():
            time.sleep(0.01)
        model(torch.ones(1, 128)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path, sabotage: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if sabotage == ["no bound"]:
        Board._may_apply = lambda self: True  # type: ignore[method-assign]
        return histories()
    rounds()
    histories()
    saved(folder)
    refused()
    last(folder)
    dt.print("servers as written out")
    return None


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), sys.argv[2:])
