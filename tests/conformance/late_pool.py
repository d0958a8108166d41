"""What each process of a pool runs: gradients applied one step later, under every sync that has them.

`-m tests.conformance.late_pool equal|travels|wires|saved FOLDER [SABOTAGE]`: faults raise.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import distributedtorch as dt
from distributedtorch.core.pairs import Posted
from distributedtorch.core.world import here
from distributedtorch.data import partition
from distributedtorch.distribute import release
from distributedtorch.sync.late import Late
from tests.conformance import late_edges, wires_pool
from tests.conformance.late_sabotage import SABOTAGES, overtaking
from tests.conformance.loops import rows
from tests.conformance.loose_pool import compare

EPOCHS = 2
SYNCS = ("ddp", "zero1", "zero2", "zero3")
Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """A layer of it is not used at every step, and at some by one rank only."""

    def __init__(self, width: int, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.middle, self.rare = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = self.middle(self.first(x).tanh()).tanh()
        return self.last(self.rare(x).tanh() if rare else x)  # type: ignore[no-any-return]


def uses(number: int, rank: int) -> bool:
    """Whether a rank uses the rare layer in a batch."""
    return number % 4 == 1 or (number % 4 == 2 and rank == 0)


class Normed(Optimizer):
    """Its update of an element depends on all elements of the parameter."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.05})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    speed = self.state[param].setdefault("speed", torch.zeros_like(param))
                    speed.mul_(0.8).add_(param.grad / (param.grad.norm() + 1e-3))
                    param.sub_(group["lr"] * speed)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def normed(model: nn.Module) -> Optimizer:
    return Normed(model.parameters())


def falling(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda taken: 1 / (1 + taken))


def by_hand(make: Make, window: int, clip: float | None, width: int, forgets: int = -1) -> list[Tensor]:
    """The mean gradient of each step, applied at the next; before step `forgets` what travels is dropped."""
    model, world = Net(width), dt.world()
    optimizer, params = make(model), list(model.parameters())
    schedule, flying, taken = falling(optimizer), dict[int, Tensor](), 0
    for _ in range(EPOCHS):
        batches = list(enumerate(rows()))
        for start in range(0, len(batches), window):
            together = batches[start : start + window]
            total = sum(len(x) for _, (x, _) in together)
            loss: Tensor = torch.zeros(())
            for number, (x, y) in together:
                for rank in range(world):
                    span = partition.rows(len(x), world, rank)
                    if len(span):
                        mine = slice(span.start, span.stop)
                        found = model(x[mine], uses(number, rank))
                        loss = loss + F.mse_loss(found, y[mine]) * (len(span) / total)
            grads = torch.autograd.grad(loss, params, allow_unused=True)
            flying = {} if taken == forgets else flying
            for k, param in enumerate(params):
                param.grad = flying.get(k)
            if clip is not None:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            schedule.step()
            flying, taken = {k: grad for k, grad in enumerate(grads) if grad is not None}, taken + 1
    return [param.detach() for param in params]


def distributed(plan: str, make: Make, width: int) -> list[Tensor]:
    model = Net(width)
    optimizer = make(model)
    model, optimizer, schedule, data = dt.distribute(model, optimizer, falling(optimizer), rows(), plan=plan)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(data):
            F.mse_loss(model(x, uses(number, dt.rank())), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def equal() -> None:
    settings = ((adam, 1, 0.3, 40, SYNCS), (normed, 2, None, 40, SYNCS[1:]), (adam, 3, 0.3, 130, SYNCS))
    for make, window, clip, width, syncs in settings:
        os.environ["DISTRIBUTEDTORCH_BUCKET_BYTES"] = "6000" if width < 100 else "80000"
        truth = by_hand(make, window, clip, width)
        for sync in syncs:
            plan = f"{sync},delay=1,accumulate={window}" + (f",clip={clip}" if clip else "")
            compare(f"{plan}, {make.__name__}", truth, distributed(plan, make, width))
            release()
    if here().comm.shared is not None:
        truth = by_hand(adam, 1, None, 40)
        compare("zero2,delay=1,share", truth, distributed("zero2,delay=1,share", adam, 40))
        release()


def in_turn() -> None:
    """Two optimizers, each with a backward of its own before both steps: none takes the other's."""
    for sync in ("ddp", "zero2"):
        models = [wires_pool.net(1), wires_pool.net(2)]
        optimizers = [wires_pool.adam(model) for model in models]
        dt.distribute(*models, *optimizers, plan=f"{sync},delay=1", batches="own")
        for step in range(wires_pool.STEPS):
            for model in models:
                wires_pool.loss_of(model, wires_pool.rows_of(step, dt.rank())).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for number, model in enumerate(models):
            compare(f"{sync},delay=1, optimizer {number}", plain(number), list(model.parameters()))
        release()


def plain(number: int) -> list[Tensor]:
    """delay=1 by hand, without a wire."""
    model, world = wires_pool.net(1 + number), dt.world()
    optimizer, params = wires_pool.adam(model), list(model.parameters())[::-1]
    flying: dict[int, Tensor] = {}
    for step in range(wires_pool.STEPS):
        every = wires_pool.gradients(model, step)
        new = {k: sum(every[rank][k] for rank in range(world)) for k in range(len(params))}
        wires_pool.apply(optimizer, params, flying)
        flying = new  # type: ignore[assignment]
    return [param.detach() for param in model.parameters()]


def travels() -> None:
    """What was sent is still under way when the next forward begins, and nothing was waited for in between."""
    for sync in SYNCS:
        model, step = stepping(f"{sync},delay=1,accumulate=2")
        assert dt.stats().backlog == 0
        late = here().loop.members[0].sync
        assert isinstance(late, Late)
        for number in range(6):
            step(number)
            last = number % 2 == 1  # of its window
            assert late.away.collect.travelling or number == 0, f"{sync}: nothing is under way after batch {number}"
            assert bool(late.now.collect.travelling) == (late.eager and not last), f"{sync}: batch {number} waits"
            assert dt.stats().backlog == int(number > 0)
        size = sum(param.numel() * param.element_size() for param in model.parameters())
        most = 2 * size if sync in ("ddp", "zero1") else 2 * size / dt.world() + size
        assert dt.stats().bytes_held["gradients"] <= 1.1 * most + 4096, f"{sync}: {dt.stats().bytes_held} of {size}"
        release()
    model, _ = stepping("zero2,delay=1")
    x = torch.ones(2, 40)
    model(x).mean().backward()
    with pytest.raises(dt.UsageError, match="a second backward before the optimizer's step"):
        model(x).mean().backward()
    release()
    model, step = stepping("zero2")
    step(0)
    assert dt.stats().backlog is None
    release()


def waits_for_nothing(patience: float) -> None:
    """Sums that are held back until the next backward is over hold nobody before that."""
    os.environ["DISTRIBUTEDTORCH_BUCKET_BYTES"] = "6000"
    pairs, finish, gates = here().comm.pairs, Late.finish, [threading.Event()]
    begin, hand_over = pairs.begin, pairs.progress.hand_over

    def begin_held(name: str, *rest: Any, **options: Any) -> Posted:
        gate = gates[-1]

        def sums(posted: Posted, act: Callable[[], None]) -> None:
            def act_then() -> None:
                assert gate.wait(patience), f"{name} is waited for before the next backward is over"
                act()

            hand_over(posted, act_then)

        pairs.progress.hand_over = sums if name.startswith("gradients/") else hand_over  # type: ignore[method-assign]
        return begin(name, *rest, **options)

    def open_last(self: Late, used: Sequence[bool]) -> None:
        for gate in gates[:-1]:
            gate.set()
        gates.append(threading.Event())
        finish(self, used)

    pairs.begin, Late.finish = begin_held, open_last  # type: ignore[method-assign]
    for sync in SYNCS:
        _, step = stepping(f"{sync},delay=1")
        for number in range(4):
            step(number)
        late = here().loop.members[0].sync
        assert isinstance(late, Late) and len(late.away.collect.travelling) == len(late.away.collect.cells) > 3
        for gate in gates:
            gate.set()
        release()
    pairs.begin, Late.finish, pairs.progress.hand_over = begin, finish, hand_over  # type: ignore[method-assign]


def changed() -> None:
    """Another plan in the middle of a run: what travels is dropped, everything else goes on."""
    truth = by_hand(adam, 1, None, 40, forgets=5)
    model = Net(40)
    optimizer = adam(model)
    schedule = falling(optimizer)
    for plan in ("zero3,delay=1", "zero2,delay=1"):
        model, optimizer, schedule, data = dt.distribute(model, optimizer, schedule, rows(), plan=plan)
        for number, (x, y) in enumerate(data):
            F.mse_loss(model(x, uses(number, dt.rank())), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        release()
    compare("zero3,delay=1, then zero2,delay=1", truth, list(model.parameters()))


def wires(names: Sequence[str]) -> None:
    for wire in names:
        plan = f"ddp,delay=1,wire={wire}"
        compare(plan, wires_pool.truth(wire, delay=1), wires_pool.distributed(plan))
        if not wire.startswith("powersgd"):
            kept = here().loop.members[0].sync.bytes_held()["left out"]
            release()
            wires_pool.distributed(f"ddp,wire={wire}")
            assert kept == here().loop.members[0].sync.bytes_held()["left out"], f"{plan} keeps more than without delay"
        release()
    for number, wire in enumerate(name for name in names if name in wires_pool.CODES):
        plan = f"zero{1 + number % 2},delay=1,wire={wire}"
        compare(plan, wires_pool.divided(wire, delay=1), wires_pool.distributed(plan))
        release()


def stepping(plan: str) -> tuple[nn.Module, Callable[..., None]]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    model, optimizer = dt.distribute(model, adam(model), plan=plan, batches="own")

    def step(number: int) -> None:
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * number + dt.rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


SAVED = (
    *("delay=1,wire=topk(0.1)", "delay=1,wire=powersgd(rank=2)", "zero1,delay=1,wire=topk(0.1)"),
    *("zero2,delay=1,accumulate=2", "zero3,delay=1,wire=int8", "zero3,delay=1"),
)


def saved(folder: Path, plans: Sequence[str]) -> None:
    for number, plan in enumerate(plans):
        there, batches = folder / str(number), 2 if "accumulate" in plan else 1
        model, step = stepping(plan)
        for k in range(6 * batches):
            step(k)
        truth = [param.detach().clone() for param in model.parameters()]
        release()
        model, step = stepping(plan)
        for k in range(3 * batches):  # an odd number: the other one's turn
            step(k)
        dt.save(there)
        for k in range(3 * batches, 6 * batches):
            step(k)
        assert all(map(torch.equal, truth, model.parameters())), f"{plan}: a save changes what comes after it"
        for fresh in (False, True):
            if fresh:
                release()
                model, step = stepping(plan)
            dt.load(there)
            for k in range(3 * batches, 6 * batches):
                step(k)
            assert all(map(torch.equal, truth, model.parameters())), f"{plan}: goes on in another way after dt.load"
        dt.load(there, model=model)
        before = [param.detach().clone() for param in model.parameters()]
        for k in range(batches):
            step(k)
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same), f"{plan}: a gradient of other parameters is applied after dt.load"
        release()


def main(what: str, folder: Path, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in words:
        SABOTAGES[word]()
    if what == "equal":
        equal()
        in_turn()
        changed()
        travels()
        late_edges.main()
    elif what == "travels":
        travels()
        waits_for_nothing(1.0 if words else 20.0)
    elif what == "wires":
        wires(["sign"] if words else [*wires_pool.CODES, "powersgd(rank=1)"])
        overtaking(sees=True)
        compare("held back", wires_pool.truth("sign", delay=1), wires_pool.distributed("ddp,delay=1,wire=sign"))
    else:
        saved(folder, SAVED[-1:] if words else SAVED)
    dt.print(f"{what} as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
