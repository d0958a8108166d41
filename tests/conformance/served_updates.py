"""Servers that changes are pushed to, beside the same replicas by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.serve.board import Event
from tests.conformance.loose_pool import adam, compare, net
from tests.conformance.served_history import STEPS, Params, dense_loss, fresh, put, run, values
from tests.serve.history import staleness


class Replica:
    """A worker of `push=updates`, by hand."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = adam(self.model)
        self.step = 0

    def change(self, worker: int, given: Params, steps: int) -> Params:
        """What its next steps make of parameters."""
        put(self.model, given)
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            dense_loss(self.model, self.step, worker).backward()
            self.optimizer.step()
        return [new - old for new, old in zip(values(self.model), given, strict=True)]


def averaged(events: list[Event], every: int) -> Params:
    """The history of a server of changes in one process."""
    present, replicas = values(net()), [Replica() for _ in range(dt.world())]
    pulled: dict[int, Params] = {}
    changes: dict[int, Params] = {}
    for event in events:
        worker = event.worker
        if event.kind == "pull":
            pulled[worker] = [value.clone() for value in present]
        elif event.kind == "push":
            steps = min(every, STEPS - replicas[worker].step)
            changes[worker] = replicas[worker].change(worker, pulled.pop(worker), steps)
        elif event.kind == "leave":
            pulled.pop(worker, None)
        elif event.kind == "apply":
            present = [value + change / dt.world() for value, change in zip(present, changes.pop(worker), strict=True)]
    return present


def main(folder: Path) -> None:
    for terms, every in (("", 1), ("staleness=2,", 2), ("staleness=1,", 5), ("ahead=1,", 3), ("staleness=0,", 5)):
        plan = f"server({terms}push=updates,every={every})" if every > 1 else f"server({terms}push=updates)"
        _, found, events = run(*fresh(adam), plan, dense_loss)
        if dt.rank() == 0:
            assert len(staleness(events)) == -(-STEPS // every) * dt.world(), plan
            compare(plan, averaged(events, every), found)
        release()
    saved(folder)
    spoiled()


def saved(folder: Path) -> None:
    """Optimizer state is each rank's own, in a checkpoint too."""
    model, optimizer = fresh(adam)
    model, optimizer = dt.distribute(model, optimizer, plan="server(staleness=0,push=updates,every=2)")

    def steps(low: int, high: int) -> None:
        for number in range(low, high):
            dense_loss(model, number, dt.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 3)
    dt.save(folder / "updates")
    own = optimizer.state[next(model.parameters())]["exp_avg"].clone()
    every_one = here().comm.exchange("own", own)
    assert not torch.equal(every_one[0], every_one[1]), "replicas with the same state"
    steps(3, 8)
    dt.sync()
    truth = values(model)
    dt.load(folder / "updates")
    assert torch.equal(own, optimizer.state[next(model.parameters())]["exp_avg"]), "another rank's state after dt.load"
    steps(3, 8)
    dt.sync()
    compare("push=updates after dt.load", truth, values(model))
    release()
    model, optimizer = fresh(adam)
    model, optimizer = dt.distribute(model, optimizer, plan="ddp")
    dt.load(folder / "updates")
    middle = every_one.mean(dim=0)
    assert torch.allclose(optimizer.state[next(model.parameters())]["exp_avg"], middle, atol=1e-12)
    release()


def spoiled() -> None:
    """What is not finite is not pushed, and the replica goes back to what it pulled."""
    model, optimizer = fresh(adam)
    model, optimizer = dt.distribute(model, optimizer, plan="server(push=updates)")
    for step in range(4):
        loss = dense_loss(model, step, dt.rank())
        if step == 2 and dt.rank() == 1:
            (loss * float("nan")).backward()
            with pytest.raises(dt.UsageError, match=r"rank 1: what the optimizer made of .* has NaN"):
                optimizer.step()
            assert all(torch.isfinite(p).all() for p in model.parameters())
            optimizer.state.clear()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    release()
