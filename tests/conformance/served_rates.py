"""Whose options a push is applied with, beside histories played again by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import distributedtorch as dt
from distributedtorch.distribute import release
from distributedtorch.serve.board import Event
from tests.conformance.loose_pool import adam, compare, net
from tests.conformance.served_history import STEPS, Params, dense_loss, fresh, grads_at, run, values
from tests.serve.history import staleness

RATE, FALL = 1e-2, 0.9


def own_options(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Each rank's own, set by the user; its scheduler counts this rank's steps."""
    optimizer.param_groups[0]["lr"] = RATE * (1 + dt.rank())
    optimizer.param_groups[0]["betas"] = (0.9 - 0.05 * dt.rank(), 0.99)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, FALL).step


def options_of(worker: int, step: int) -> tuple[float, float]:
    return RATE * (1 + worker) * FALL ** (step - 1), 0.9 - 0.05 * worker


def again(events: list[Event], *, own: bool) -> Params:
    """The same history in one process: with each worker's options, or the rate divided by the staleness."""
    model = net()
    optimizer = adam(model)
    pulled: dict[int, tuple[int, Params]] = {}
    used: dict[int, tuple[int, Params]] = {}
    for event in events:
        if event.kind == "pull":
            pulled[event.worker] = event.version, values(model)
        elif event.kind == "push":
            used[event.worker] = pulled.pop(event.worker)
        elif event.kind == "leave":
            pulled.pop(event.worker, None)
        elif event.kind == "apply":
            version, given = used[event.worker]
            step, worker = event.step, event.worker
            grads = grads_at(net, given, partial(dense_loss, step=step, worker=worker))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            group = optimizer.param_groups[0]
            if own:
                group["lr"], beta = options_of(worker, step)
                group["betas"] = (beta, 0.99)
            else:
                group["lr"] = RATE / max(1, event.version - 1 - version)
            optimizer.step()
    return values(model)


def rounds_with_rates() -> Params:
    model, world = net(), dt.world()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        options = [options_of(worker, step) for worker in range(world)]
        rate = sum(lr for lr, _ in options) / world
        optimizer.param_groups[0]["lr"] = rate
        optimizer.param_groups[0]["betas"] = (sum(beta for _, beta in options) / world, 0.99)
        every = [grads_at(net, values(model), partial(dense_loss, step=step, worker=w)) for w in range(world)]
        for k, param in enumerate(model.parameters()):
            weighed = [grads[k] * lr / rate for grads, (lr, _) in zip(every, options, strict=True)]
            param.grad = sum(weighed) / world
        optimizer.step()
    return values(model)


def main(folder: Path) -> None:
    for plan in ("server(rates=own)", "server(staleness=2,rates=own)", "server(staleness=3,rates=staleness)"):
        own = "own" in plan
        _, found, events = run(*fresh(adam), plan, dense_loss, own_options if own else None)
        if dt.rank() == 0:
            late = staleness(events)
            assert len(late) == STEPS * dt.world()
            compare(plan, again(events, own=own), found)
        release()
    plan = "server(staleness=0,rates=own)"
    _, found, _ = run(*fresh(adam), plan, dense_loss, own_options)
    compare(plan, rounds_with_rates(), found)
    release()
    kept_options(folder)


def kept_options(folder: Path) -> None:
    """A checkpoint has every rank's."""
    model, optimizer = fresh(adam)
    model, optimizer = dt.distribute(model, optimizer, plan="server(staleness=0,rates=own)")
    own_options(optimizer)
    dt.save(folder / "rates")
    for name in ("lr", "betas"):
        optimizer.param_groups[0][name] = adam(net()).param_groups[0][name]
    dt.load(folder / "rates")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"][0]) == options_of(dt.rank(), 1), "another rank's options after dt.load"
    release()
