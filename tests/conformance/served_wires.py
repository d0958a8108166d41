"""Pushes and pulls in codes, beside both ends written out by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.distribute import release
from distributedtorch.serve.parcel import key
from tests.conformance import wires_pool
from tests.conformance.loose_pool import adam, compare, sgd
from tests.conformance.served_history import STEPS, Params, grads_at, run, values


class ByHand:
    """Both ends of one server with a wire, all workers in one process."""

    def __init__(self, wire: str) -> None:
        self.lossy, self.feedback = wires_pool.CODES[wire]
        self.model = wires_pool.net()
        self.params = list(self.model.parameters())[::-1]  # as they are numbered
        self.optimizer = adam(self.model)
        self.left: dict[tuple[int, int], Tensor] = {}
        self.has: dict[int, Params] = {}
        self.version: dict[int, int] = {}

    def pull(self, worker: int, version: int) -> Params:
        """What a worker has then, in the model's order."""
        if worker not in self.has:
            self.has[worker] = [param.detach().clone() for param in self.params]
        elif version != self.version[worker]:
            for number, param in enumerate(self.params):
                missing = param.detach() - self.has[worker][number]
                self.has[worker][number] += self._arrives("pull", worker, number, version, missing)
        self.version[worker] = version
        return [value.clone() for value in self.has[worker]][::-1]

    def push(self, worker: int, step: int, given: Params) -> list[Tensor]:
        """What arrives of a gradient, as parameters are numbered."""
        grads = grads_at(wires_pool.net, given, partial(wire_loss, step=step, worker=worker))
        out = []
        for number, grad in enumerate(grads[::-1]):
            assert grad is not None
            whole = grad + self.left.get((worker, number), torch.zeros_like(grad)) if self.feedback else grad
            out.append(self._arrives("push", worker, number, step, whole))
            self.left[worker, number] = whole - out[-1]
        return out

    def _arrives(self, way: str, worker: int, number: int, at: int, value: Tensor) -> Tensor:
        if value.numel() < 1024:
            return value
        known = key(way, worker, number, at)
        return self.lossy(value.reshape(-1), known, torch.Generator().manual_seed(known)).view(value.shape)

    def apply(self, pushes: list[list[Tensor]]) -> None:
        for number, param in enumerate(self.params):
            param.grad = sum(push[number] for push in pushes) / len(pushes)
        self.optimizer.step()


def wire_loss(model: nn.Module, step: int, worker: int) -> Tensor:
    return wires_pool.loss_of(model, wires_pool.rows_of(step, worker))


def main(folder: Path) -> None:
    for wire in wires_pool.CODES:
        plan, truth = f"server(staleness=0),wire={wire}", ByHand(wire)
        for step in range(1, STEPS + 1):
            given = [truth.pull(worker, step - 1) for worker in range(dt.world())]
            truth.apply([truth.push(worker, step, given[worker]) for worker in range(dt.world())])
        for worker in range(dt.world()):
            truth.pull(worker, STEPS)
        model = wires_pool.net()
        own, found, _ = run(model, adam(model), plan, wire_loss)
        compare(f"{plan}: a worker's copy", truth.has[dt.rank()][::-1], own)
        compare(plan, values(truth.model), found)
        release()
    in_turn("server(staleness=2),wire=topk(0.1)")
    in_turn("server,wire=int8")
    kept(folder)
    shorter()


def in_turn(plan: str) -> None:
    """A history with a wire."""
    model = wires_pool.net()
    _, found, events = run(model, adam(model), plan, wire_loss)
    if dt.rank() == 0:
        truth = ByHand(plan.rsplit("=", maxsplit=1)[-1])
        pulled: dict[int, Params] = {}
        pushed: dict[int, list[Tensor]] = {}
        for event in events:
            if event.kind == "pull":
                pulled[event.worker] = truth.pull(event.worker, event.version)
            elif event.kind == "push":
                pushed[event.worker] = truth.push(event.worker, event.step, pulled.pop(event.worker))
            elif event.kind == "leave":
                pulled.pop(event.worker, None)
            elif event.kind == "apply":
                truth.apply([pushed.pop(event.worker)])
        compare(plan, values(truth.model), found)
    release()


def kept(folder: Path) -> None:
    """What was left out is in the checkpoint; updates travel in codes too."""
    for number, plan in enumerate(
        ("server(staleness=0,servers=2),wire=topk(0.1)", "server(staleness=0,push=updates,every=2),wire=topk(0.1)")
    ):
        model = wires_pool.net()
        model, optimizer = dt.distribute(model, adam(model), plan=plan)

        def steps(low: int, high: int, model: Any = model, optimizer: Any = optimizer) -> Params:
            for step in range(low, high):
                wire_loss(model, step, dt.rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
            dt.sync()
            return values(model)

        steps(0, 4)
        dt.save(folder / f"wire{number}")
        truth = steps(4, 8)
        dt.load(folder / f"wire{number}")
        compare(f"{plan} after dt.load", truth, steps(4, 8))
        release()


def shorter() -> None:
    """Both ways take fewer bytes."""
    sent, before = {}, [0, 0]
    for plan in ("server(staleness=0)", "server(staleness=0),wire=int8"):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(100, 100, bias=False)
        model, optimizer = dt.distribute(model, sgd(model), plan=plan)
        for step in range(4):
            model(torch.ones(2, 100) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            now = [dt.stats().bytes_sent[kind] for kind in ("push", "pull")]
            sent[plan] = [new - old for new, old in zip(now, before, strict=True)]
            before = now
        release()
    whole, codes = sent.values()
    assert whole == [64 + 80000] * 2 and codes == [64 + -(-(10000 + 4 * 40) // 64) * 64] * 2, sent
