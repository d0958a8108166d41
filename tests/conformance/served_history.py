"""Runs under a parameter server with their histories, for what pools write out by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.serve.board import Event
from distributedtorch.sync.served import Served
from tests.conformance.loose_pool import net
from tests.conformance.server_pool import loss_of, rows_of

STEPS = 12
Params = list[Tensor]


def served() -> Served:
    sync = here().loop.members[0].sync
    assert isinstance(sync, Served)
    return sync


def values(model: nn.Module) -> Params:
    return [param.detach().clone() for param in model.parameters()]


def put(model: nn.Module, given: Params) -> nn.Module:
    for param, value in zip(model.parameters(), given, strict=True):
        param.data.copy_(value)
    return model


def grads_at(make: Callable[[], nn.Module], given: Params, loss: Callable[[nn.Module], Tensor]) -> list[Tensor | None]:
    """Gradients of a loss where parameters are so."""
    model = put(make(), given)
    loss(model).backward()
    return [param.grad for param in model.parameters()]


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: str,
    loss: Callable[[nn.Module, int, int], Tensor],
    before: Callable[[torch.optim.Optimizer], Callable[[], None]] | None = None,
) -> tuple[Params, Params, list[Event]]:
    """Workers at different speeds; what they have before and after dt.sync, and the first server's history."""
    model, optimizer = dt.distribute(model, optimizer, plan=plan)
    events: list[Event] = []
    desk = served().desk
    if desk is not None:
        desk.board.note = events.append
    after_step = before(optimizer) if before else lambda: None
    dt.barrier()
    draw = random.Random(dt.rank())
    for step in range(1, STEPS + 1):
        loss(model, step, dt.rank()).backward()
        time.sleep(draw.random() * 0.004 * (1 + dt.rank()))
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    own = values(model)
    dt.sync()
    found = values(model)
    flat = here().comm.exchange("found", torch.cat([t.view(-1) for t in found]))
    assert (flat == flat[0]).all(), f"{plan}: dt.sync leaves workers with different parameters"
    return own, found, events


def dense_loss(model: nn.Module, step: int, worker: int) -> Tensor:
    return loss_of(model, rows_of(step, worker))


def fresh(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, make(model)
