"""What each process of a pool runs: replicas that step alone, beside the same replicas written out by hand.

`-m tests.conformance.loose_pool rounds|saved FOLDER [SABOTAGE]`: faults raise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.data import partition
from distributedtorch.distribute import release
from distributedtorch.sync.gossip import Gossip
from distributedtorch.sync.groups import Groups
from distributedtorch.sync.local import Local
from distributedtorch.sync.loose import Loose
from distributedtorch.sync.rounds import Rounds
from distributedtorch.sync.underway import UnderWay
from tests.conformance.loops import rows

EPOCHS = 3
Rule = Callable[[int, list[nn.Module]], None]
"""What happens to all replicas after each step."""


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_hand(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    rule: Rule,
    window: int,
    batch: int,
    *,
    together_for: int = 0,
) -> list[Tensor]:
    """All replicas in one process, which have the same rows for so many steps; the present rank's values."""
    world = dt.world()
    replicas = [copy.deepcopy(model) for _ in range(world)]
    optimizers = [make(replica) for replica in replicas]
    taken = 0
    for _ in range(EPOCHS):
        batches = list(rows(batch=batch))
        for start in range(0, len(batches), window):
            together = batches[start : start + window]
            total = sum(len(x) for x, _ in together)
            for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
                for x, y in together:
                    span = partition.rows(len(x), world, rank)
                    if taken < together_for:
                        (F.mse_loss(replica(x), y) * len(x) / total).backward()
                    elif len(span):
                        mine = slice(span.start, span.stop)
                        part = len(span) * world / total
                        (F.mse_loss(replica(x[mine]), y[mine]) * part).backward()
                    else:
                        (F.mse_loss(replica(x[:1]), y[:1]) * 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            taken += 1
            rule(taken, replicas)
    return [*replicas[dt.rank()].parameters(), *replicas[dt.rank()].buffers()]


def distributed(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], plan: str, batch: int = 5
) -> list[Tensor]:
    model, optimizer, data = dt.distribute(model, make(model), rows(batch=batch), plan=plan)
    for _ in range(EPOCHS):
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def columns(replicas: Sequence[nn.Module]) -> list[tuple[Tensor, ...]]:
    """For each parameter and running statistic, every replica's."""
    every = [[t.data for t in (*r.parameters(), *r.buffers()) if t.is_floating_point()] for r in replicas]
    return list(zip(*every, strict=True))


def mean(replicas: Sequence[nn.Module]) -> None:
    for tensors in columns(replicas):
        middle = sum(tensors) / len(tensors)
        for tensor in tensors:
            tensor.copy_(middle)


def every(k: int, after: int = 0) -> Rule:
    def rule(taken: int, replicas: list[nn.Module]) -> None:
        if taken <= after or (taken - after) % k == 0:
            mean(replicas)

    return rule


def nesterov(k: int, lr: float = 0.7, momentum: float = 0.6) -> Rule:
    outer = [tensor.detach() for tensor in net().parameters()]
    speed = [torch.zeros_like(tensor) for tensor in outer]

    def rule(taken: int, replicas: list[nn.Module]) -> None:
        if taken % k:
            return
        for index, tensors in enumerate(columns(replicas)):
            gradient = outer[index] - sum(tensors) / len(tensors)
            speed[index] = momentum * speed[index] + gradient
            outer[index] = outer[index] - lr * (gradient + momentum * speed[index])
            for tensor in tensors:
                tensor.copy_(outer[index])

    return rule


def in_pairs(k: int, kind: str) -> Rule:
    def rule(taken: int, replicas: list[nn.Module]) -> None:
        if taken % k:
            return
        number, world = taken // k - 1, len(replicas)
        order = [(r + number % 2) % world for r in range(world)]
        if kind == "random":
            order = torch.randperm(world, generator=torch.Generator().manual_seed(number)).tolist()
        for left, right in zip(order[::2], order[1::2], strict=False):
            mean([replicas[left], replicas[right]])

    return rule


def ddp(taken: int, replicas: list[nn.Module]) -> None:
    mean(replicas)


def compare(what: str, truth: list[Tensor], found: list[Tensor]) -> None:
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(truth, found, strict=True)]
    gap = max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)
    assert gap <= 1e-9, f"{what}: {gap:.2e} from the algorithm written out"


def check(
    plan: str,
    rule: Rule,
    make: Callable[..., torch.optim.Optimizer] = adam,
    *,
    window: int = 1,
    norm: bool = False,
    together_for: int = 0,
    converted: bool = False,
) -> None:
    batch = 12 if norm else 5  # a single row has no variance
    truth = by_hand(net(norm=norm), make, rule, window, batch, together_for=together_for)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(norm=norm)) if converted else net(norm=norm)
    found = distributed(model, make, plan, batch)
    compare(plan, truth, found)
    release()


def rounds() -> None:
    check("local(every=1)", ddp, sgd)
    check("local(every=3)", every(3))
    check("local(every=4,after=5)", every(4, after=5), together_for=5)
    check("local(every=3,after=2),accumulate=2", every(3, after=2), window=2, together_for=2)
    check("local(every=3,after=0)", every(3))
    check("local(every=2,after=3)", every(2, after=3), sgd, norm=True, together_for=3)
    check("local(every=2,after=3)", every(2, after=3), sgd, norm=True, together_for=3, converted=True)
    check("local(every=2),accumulate=2", every(2), window=2)
    check("local(every=2)", every(2), sgd, norm=True)  # Adam would make much of a bias that has no effect
    check("diloco(every=3)", nesterov(3))
    check("diloco(every=4,lr=1.0,momentum=0.5)", nesterov(4, 1.0, 0.5))
    check("gossip", in_pairs(1, "ring"))
    check("gossip(every=2,pairs=random)", in_pairs(2, "random"))


def grouped(every_: int, drift: float | None, fixed: str = "", combine: str = "mean", window: int = 1) -> list[Tensor]:
    """groups(...) by hand: one process plays all ranks."""
    world, model = dt.world(), net()
    optimizer = adam(model)
    params = list(model.parameters())
    origin = [p.detach().clone() for p in params]
    rare = [bool(fixed) and fixed in name.split(".") for name, _ in model.named_parameters()]
    kept = [torch.zeros_like(p) for p in params]
    taken = 0
    for _ in range(EPOCHS):
        batches = list(rows())
        for start in range(0, len(batches), window):
            together = batches[start : start + window]
            total = sum(len(x) for x, _ in together)
            loss = sum(F.mse_loss(model(x), y) * (len(x) / total) for x, y in together)
            mean_now = torch.autograd.grad(loss, params)  # type: ignore[arg-type]
            taken += 1
            for k, param in enumerate(params):
                kept[k] += mean_now[k]
                param.grad = None
                if not rare[k] or taken % every_ == 0:
                    param.grad = kept[k] * (world if rare[k] and combine == "sum" else 1)
                    kept[k] = torch.zeros_like(param)
            optimizer.step()
            if drift is not None and taken % every_ == 0:
                rare = [bool((p - o).norm() < drift * o.norm()) for p, o in zip(params, origin, strict=True)]
    return params  # type: ignore[return-value]


def groups() -> None:
    for plan, truth in (
        ("groups(every=1)", grouped(1, 0.01)),
        ("groups(every=3,drift=0.1)", grouped(3, 0.1)),
        ("groups(every=3,fixed=weight)", grouped(3, None, "weight")),
        ("groups(every=3,fixed=bias,combine=sum)", grouped(3, None, "bias", "sum")),
        ("groups(every=2,fixed=weight),accumulate=2", grouped(2, None, "weight", window=2)),
    ):
        compare(plan, truth, distributed(net(), adam, plan))
        sync = here().loop.members[0].sync
        assert isinstance(sync, Groups) and (sync.share < 1 or "drift" in plan or "every=1" in plan)
        release()


def disturbed() -> None:
    """Copies, loads and overflows in the middle of a run."""
    truth = by_hand(net(), adam, nesterov(3), 1, 5)
    model = net()
    model, optimizer, data = dt.distribute(model, adam(model), rows(), plan="diloco(every=3)")
    best = copy.deepcopy(model)
    for _ in range(EPOCHS):
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            best.load_state_dict(model.state_dict())
    compare("diloco beside a copy", truth, list(model.parameters()))
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].load_state_dict(net()[0].state_dict())  # type: ignore[index]
        break
    dt.sync()
    first = [p.detach().clone() for p in model.parameters()][:2]
    assert spread(model) == 0 and all(map(torch.allclose, first, list(net().parameters())[:2])), "a load is no movement"
    release()
    for plan in ("wire=topk(0.1)", "wire=powersgd(rank=1)"):
        model, step = stepping(plan)
        for number in range(6):
            step(number, factor=float("inf") if number == 2 else 1.0)
        assert all(torch.isfinite(p).all() for p in model.parameters()), f"{plan}: an overflow stays"
        release()


def follows() -> None:
    """The period follows the drift, and `dt.sync` makes replicas the same."""
    for word, most in product(("local", "diloco"), (1e3, 1e-9)):
        distributed(net(), adam, f"{word}(every=4,drift={most})")
        sync = here().loop.members[0].sync
        assert isinstance(sync, Rounds) and (sync.period > 4 if most > 1 else sync.period < 4), (word, sync.period)
        assert sync.drift is not None and dt.stats().drift == sync.drift > 0
        release()
    for plan in ("local(every=100)", "diloco(every=100)", "gossip(every=100)"):
        model = net()
        distributed(model, adam, plan)
        gap = spread(model)
        dt.sync()
        assert gap > 1e-6 and spread(model) == 0, (plan, gap, spread(model))
        release()


def same(tensor: Tensor) -> bool:
    """Whether all ranks have it alike."""
    every_one = here().comm.exchange("same", tensor.detach())
    return bool((every_one == every_one[0]).all())


def spread(model: nn.Module) -> float:
    """How far replicas are apart."""
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    every_one = here().comm.exchange("spread", flat)
    return float((every_one - every_one[0]).abs().max())


def post() -> None:
    """local(after=...): what it refuses, and that it can be taken back to an earlier step with gradients shown."""
    model = net()
    some = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(dt.UsageError, match=r"0\.weight.*\n.*\n.*requires_grad_\(False\)"):
        dt.distribute(model, some, plan="local(every=4,after=3)")
    release()
    for plan in ("local(every=100,after=3),wire=int4", "local(every=100,after=3)"):
        model = net(norm=True)
        model, optimizer = dt.distribute(model, sgd(model), plan=plan, batches="own")
        for number in range(3):
            F.mse_loss(model(torch.ones(4, 8) * number + torch.eye(4, 8)), torch.zeros(4, 3)).backward()
            if number == 2:
                model[0].bias.data.add_(dt.rank())
                model[1].running_mean.add_(dt.rank())
            optimizer.step()
            optimizer.zero_grad()
        assert spread(model) == 0, f"{plan}: replicas that differ when they part stay apart"
        assert same(model[1].running_mean), f"{plan}: running statistics stay apart"
        release()
    for after, back in ((100, "together"), (3, "over the parting")):
        model, step = stepping(f"local(every=2,after={after}),wire=int2", set_to_none=False)
        step(0)
        early = {name: value.clone() for name, value in here().loop.members[0].sync.own_state().items()}
        for number in range(1, 6):
            step(number)
        truth = [p.detach().clone() for p in model.parameters()]
        release()
        model, step = stepping(f"local(every=2,after={after}),wire=int2", set_to_none=False)
        step(0)
        kept = copy.deepcopy(here().loop.members[0].sync.optimizer.state_dict())
        for number in range(1, 4 if after == 3 else 3):
            step(number)
        sync = here().loop.members[0].sync
        sync.optimizer.load_state_dict(kept)
        sync.take_own_state(early)
        for number in range(1, 6):
            step(number)
        assert all(map(torch.equal, truth, model.parameters())), f"taken back {back}: goes on in another way"
        release()


def saved(folder: Path) -> None:
    for number, plan in enumerate(
        [
            "local(every=3)",
            "local(every=3),wire=topk(0.1)",
            "local(every=2,after=5),wire=int2",
            "local(every=3,after=2),wire=topk(0.1)",
            "diloco(every=3)",
            "local(every=3),delay=2",
            "local(every=3),wire=topk(0.1),delay=3",
            "diloco(every=3),delay=2",
            "gossip",
            "groups(every=3,drift=0.1)",
            "wire=topk(0.1)",
            "wire=powersgd(rank=1)",
            "zero1,wire=topk(0.1)",
            "zero2,wire=int8",
        ]
    ):
        there = str(folder / str(number))
        model, step = stepping(plan)
        for k in range(4):
            step(k)
        agreed = here().loop.members[0].sync.consensus()
        for_all = [agreed.get(id(p), p).detach().clone() for p in model.parameters()]
        dt.save(there)
        before = [p.detach().clone() for p in model.parameters()]
        for k in range(4, 8):
            step(k)
        truth = [p.detach().clone() for p in model.parameters()]
        release()
        model, step = stepping(plan)
        dt.load(there)
        assert all(map(torch.equal, before, model.parameters())), f"{plan}: another replica after dt.load"
        for k in range(4, 8):
            step(k)
        assert all(map(torch.equal, truth, model.parameters())), f"{plan}: goes on in another way after dt.load"
        release()
        model, _ = stepping("ddp")
        dt.load(there)
        assert all(map(torch.equal, for_all, model.parameters())), f"{plan}: other values under another plan"
        middle = here().comm.exchange("before", torch.cat([t.view(-1) for t in before])).mean(dim=0)
        found = torch.cat([p.detach().view(-1) for p in model.parameters()])
        exact = "zero" in plan  # what ranks compute with is then not what they keep
        assert exact or torch.allclose(found, middle, atol=1e-12), f"{plan}: not the mean of replicas"
        release()


def stepping(plan: str, *, set_to_none: bool = True) -> tuple[nn.Module, Callable[..., None]]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    model, optimizer = dt.distribute(model, adam(model), plan=plan, batches="own")

    def step(number: int, factor: float = 1.0) -> None:
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * number + dt.rank()))
        (model(x).square().mean() * factor).backward()
        if all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return model, step


def sabotage(what: str) -> None:
    if what == "one rank keeps its own":
        average = Local.average
        Local.average = lambda self, wire: average(self, wire) if dt.rank() else _kept(self, average, wire)  # type: ignore[method-assign]
    elif what == "always the same pairs":
        original = Gossip.agree

        def agree(self: Gossip) -> None:
            number, self.rounds = self.rounds, 0
            original(self)
            self.rounds = number

        Gossip.agree = agree  # type: ignore[method-assign]
    elif what == "under way not saved":
        UnderWay.state = lambda self: {}  # type: ignore[method-assign]
    elif what == "replicas not saved":
        Loose.take_own_state = lambda self, state: None  # type: ignore[method-assign,misc]


def _kept(sync: Local, average: Callable[..., tuple[float, float]], wire: object) -> tuple[float, float]:
    before = [p.detach().clone() for p in sync.params]
    result = average(sync, wire)
    for param, value in zip(sync.params, before, strict=True):
        param.data.copy_(value)
    return result


def main(what: str, folder: Path, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in words:
        sabotage(word)
    if what == "rounds":
        rounds()
        groups()
        follows()
    else:
        saved(folder)
        post()
        disturbed()
    dt.print(f"{what} as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
