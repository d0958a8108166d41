"""Rows of tables pushed and pulled, beside histories played again by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.distribute import release
from distributedtorch.serve.board import Event, Refused
from distributedtorch.serve.channel import Kind
from distributedtorch.serve.parcel import Form, joined
from tests.conformance.loose_pool import compare
from tests.conformance.served_history import Params, grads_at, put, run, served, values


class Words(nn.Module):
    """A table, and something dense after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(60, 5, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def table_only() -> nn.Module:
    torch.manual_seed(1)
    return nn.Embedding(60, 5, sparse=True)


def ids_of(step: int, worker: int) -> Tensor:
    return torch.randint(0, 60, (6,), generator=torch.Generator().manual_seed(100 * step + worker))


def table_loss(model: nn.Module, step: int, worker: int) -> Tensor:
    return (model(ids_of(step, worker)) - 1.0).square().mean()


def replayed(events: list[Event], make: Callable[[], nn.Module], optimizer_of: Any) -> Params:
    model = make()
    optimizer = optimizer_of(model)
    pulled: dict[int, Params] = {}
    used: dict[int, Params] = {}
    waiting: list[tuple[int, list[Tensor | None]]] = []
    for number, event in enumerate(events):
        if event.kind == "pull":
            pulled[event.worker] = values(model)
        elif event.kind == "push":
            used[event.worker] = pulled.pop(event.worker)
        elif event.kind == "leave":
            pulled.pop(event.worker, None)
        elif event.kind == "apply":
            step, worker = event.step, event.worker
            loss = partial(table_loss, step=step, worker=worker)
            waiting.append((event.version, grads_at(make, used[worker], loss)))
            more = number + 1 < len(events) and events[number + 1].kind == "apply"
            if more and events[number + 1].version == event.version:
                continue
            for k, param in enumerate(model.parameters()):
                param.grad = reduce(add, [grads[k] for _, grads in waiting]) / len(waiting)
            optimizer.step()
            waiting = []
    return values(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


def main(folder: Path) -> None:
    for plan, make, optimizer_of in (
        ("server(staleness=2)", Words, sgd),
        ("server(staleness=0)", Words, sgd),
        ("server(servers=2)", table_only, sparse_adam),
        ("server(staleness=0)", table_only, sparse_adam),
        ("server(staleness=1)", table_only, with_momentum),
        ("server(staleness=1),wire=int8", table_only, sgd),
    ):
        model = make()
        _, found, events = run(model, optimizer_of(model), plan, table_loss)
        if dt.rank() == 0:
            compare(f"{plan} of rows", replayed(events, make, optimizer_of), found)
        release()
    model = table_only()
    model, optimizer = dt.distribute(model, sparse_adam(model), plan="server(staleness=0,push=updates)")
    for step in range(3):
        table_loss(model, step, dt.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    compare("push=updates of rows", averaged_rows(), values(model))
    release()
    counted()
    wrong_rows()


def averaged_rows() -> Params:
    """Three rounds of replicas with SparseAdam."""
    models = [table_only() for _ in range(dt.world())]
    optimizers = [sparse_adam(model) for model in models]
    for step in range(3):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            table_loss(model, step, worker).backward()
            optimizer.step()
        middle = sum(values(model)[0] for model in models) / dt.world()
        for model in models:
            put(model, [middle])
    return values(models[0])


def counted() -> None:
    """Bytes of a step: the rows used there, the rows changed back."""
    torch.manual_seed(1)
    table = nn.Embedding(3000, 8, sparse=True)
    before = table.weight.detach().clone()
    table, optimizer = dt.distribute(table, sparse_adam(table), plan="server(staleness=0)")
    ids = torch.tensor([dt.rank(), dt.rank(), 100, 2000 + dt.rank()])
    used = sorted({row for rank in range(dt.world()) for row in (rank, 100, 2000 + rank)})
    sent = []
    for _ in range(3):
        table(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append([dt.stats().bytes_sent[kind] for kind in ("push", "pull")])
    row = 8 + 8 * 8
    due = [64 + -(-count * row // 64) * 64 for count in (3, len(used))]
    assert [new - old for new, old in zip(sent[2], sent[1], strict=True)] == due, (sent, due)
    assert (table.weight.detach() != before).any(1).nonzero().view(-1).tolist() == used
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (3000, 8)
    release()


def wrong_rows() -> None:
    """Rows that are not in the table are refused over the real channel, and nothing is applied."""
    model = table_only()
    model, _ = dt.distribute(model, sparse_adam(model), plan="server")
    if dt.rank() == 0:
        line, desk = served().lines[0], served().desk
        assert desk is not None
        line.say(Kind.PULL)
        line.hear()
        for numbers, said in (([60], "table of 60"), ([4, 3], "rising order")):
            parts = [torch.tensor(numbers).view(torch.uint8), torch.ones(5 * len(numbers)).view(torch.uint8)]
            line.say(Kind.PUSH, 1, joined([(Form.ROWS, torch.cat(parts))]))
            with pytest.raises(Refused, match=said):
                line.hear()
        assert desk.board.version == 0 and torch.equal(desk.shard.masters[0], table_only().weight)
        line.say(Kind.LEAVE)
    dt.barrier()
    release()
