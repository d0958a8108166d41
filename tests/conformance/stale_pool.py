"""What each process of a pool runs: servers that compensate delays, two of them with a bound, and one that fails.

`-m tests.conformance.stale_pool compensated|two|fails [SABOTAGE]`: faults raise.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.serve.board import Board, Event
from distributedtorch.serve.shard import Shard
from tests.conformance.loose_pool import adam, compare, net
from tests.conformance.server_pool import STEPS, loss_of, rows_of, served, train
from tests.serve.history import staleness

FACTOR, BOUND, SERVERS = 0.5, 2, 2


def gradients(values: list[Tensor], worker: int, step: int) -> list[Tensor]:
    """Of one worker's rows at these parameters."""
    model = net()
    for param, value in zip(model.parameters(), values, strict=True):
        param.data.copy_(value)
    return list(torch.autograd.grad(loss_of(model, rows_of(step, worker)), list(model.parameters())))


def compensated() -> None:
    """g + f g^2 (w_now - w_then), for each push in the order in which they were applied."""
    found, events = train(f"server(staleness=3,compensate={FACTOR})")
    if dt.rank() == 0:
        assert max(staleness(events)) > 0, "nothing was late"
        model = net()
        optimizer, params = adam(model), list(model.parameters())
        pulled: dict[int, list[Tensor]] = {}
        used: dict[int, list[Tensor]] = {}
        for event in events:
            if event.kind == "pull":
                pulled[event.worker] = [p.detach().clone() for p in params]
            elif event.kind == "push":
                used[event.worker] = pulled.pop(event.worker)
            elif event.kind == "apply":
                then = used[event.worker]
                for param, old, grad in zip(params, then, gradients(then, event.worker, event.step), strict=True):
                    param.grad = grad + FACTOR * grad.square() * (param.detach() - old)
                optimizer.step()
        compare("compensate", [p.detach() for p in params], found)
    release()


class Server:
    """One of two servers by hand: its part of the parameters, and every version of them."""

    def __init__(self, part: list[int], events: list[Event]) -> None:
        self.part, self.events = part, [event for event in events if event.kind == "apply"]
        self.params = [nn.Parameter(p.detach().clone()) for k, p in enumerate(net().parameters()) if k in part]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-2)
        self.versions = [[p.detach().clone() for p in self.params]]
        self.used: dict[tuple[int, int], int] = {}
        """By worker and step the version that was pulled for it."""
        pulled: dict[int, int] = {}
        for event in events:
            if event.kind == "pull":
                pulled[event.worker] = event.version
            elif event.kind == "push":
                self.used[event.worker, event.step] = pulled[event.worker]


def again(servers: list[Server]) -> list[Tensor]:
    """Both histories, as far as each can go with what the other has."""
    while any(server.events for server in servers):
        moved = False
        for server in servers:
            if not server.events:
                continue
            worker, step = server.events[0].worker, server.events[0].step
            if any(len(other.versions) <= other.used[worker, step] for other in servers):
                continue
            values = whole([(other.part, other.versions[other.used[worker, step]]) for other in servers])
            grads = gradients(values, worker, step)
            for param, index in zip(server.params, server.part, strict=True):
                param.grad = grads[index]
            server.optimizer.step()
            server.versions.append([p.detach().clone() for p in server.params])
            server.events.pop(0)
            moved = True
        assert moved, "a history that cannot be: each server waits for a version of the other"
    return whole([(server.part, server.versions[-1]) for server in servers])


def whole(parts: list[tuple[list[int], list[Tensor]]]) -> list[Tensor]:
    found = {index: value for part, values in parts for index, value in zip(part, values, strict=True)}
    return [found[index] for index in sorted(found)]


def two() -> None:
    """Each server keeps to the bound, and both together are the history that they wrote down."""
    found, events, parts = observed(f"server(staleness={BOUND},servers={SERVERS})")
    late = [staleness(one) for one in events]
    assert all(len(one) == STEPS * dt.world() and max(one) <= BOUND for one in late), f"staleness {late}"
    assert max(map(max, late)) > 0, "nothing was late"
    compare("two servers", again([Server(part, one) for part, one in zip(parts, events, strict=True)]), found)
    release()


def observed(plan: str) -> tuple[list[Tensor], list[list[Event]], list[list[int]]]:
    found, mine = train(plan)
    count = len(net().state_dict())
    # A sync has its parameters in reverse.
    parts = [sorted(count - 1 - index for index in part) for part in served().parts]
    texts = here().comm.bytes_of_all("events", json.dumps([asdict(event) for event in mine]).encode())
    return found, [[Event(**one) for one in json.loads(text)] for text in texts[:SERVERS]], parts


class Failing(torch.optim.SGD):
    """An optimizer that breaks down."""

    taken = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.taken += 1
        if self.taken > 3:
            raise ValueError("the optimizer has run dry")
        super().step()


def fails() -> None:
    """Every worker hears of it, by name and soon."""
    model = net()
    model, optimizer = dt.distribute(model, Failing(model.parameters(), lr=0.1), plan="server")
    began = time.monotonic()
    said = "refused by the server: the server has failed: ValueError: the optimizer has run dry"
    with pytest.raises(dt.UsageError, match=said):
        for step in range(100):
            loss_of(model, rows_of(step, dt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert time.monotonic() - began < 10
    heard = here().comm.exchange("heard", torch.ones(1))
    assert int(heard.sum()) == dt.world()


def sabotage(what: str) -> None:
    if what == "not compensated":
        Shard.compensated = lambda self, push: push  # type: ignore[method-assign]
    elif what == "no bound":
        Board._may_apply = lambda self: True  # type: ignore[method-assign]


def main(what: str, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in words:
        sabotage(word)
    {"compensated": compensated, "two": two, "fails": fails}[what]()
    dt.print(f"{what} as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1], sys.argv[2:])
