"""What each process of a pool runs: rounds by the clock, in 16 bits, in another world, and what is said of replicas.

`-m tests.conformance.rounds_pool clock|narrow|leave|enter|misfit|scored FOLDER [SABOTAGE]`: faults raise. `enter` goes
on in two processes where `leave` has saved in three.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.replicas import BUCKET_BYTES
from distributedtorch.sync import local, loose, rounds
from distributedtorch.sync.diloco import Diloco
from distributedtorch.sync.local import Local
from tests.conformance.loops import rows
from tests.conformance.loose_pool import EPOCHS, adam, by_hand, compare, distributed, mean, net, spread, stepping

SECONDS = 1.25


class Clock:
    """Only steps move it: what comes of seconds does not depend on how busy the machine is."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


def seconds_of(step: int, rank: int) -> float:
    return 0.1 * (1 + rank) * (1 if step <= 6 else 2)


def due(steps: int) -> set[int]:
    """After which steps all meet: first after two, then as soon as the slowest has used up the seconds."""
    found, last, period = {2}, 0, 2
    while last + period <= steps:
        last, begun = last + period, last
        found.add(last)
        pace = sum(seconds_of(step, dt.world() - 1) for step in range(begun + 1, last + 1)) / (last - begun)
        period = max(1, round(SECONDS / pace))
    return found


def by_clock() -> None:
    local.time = Clock  # type: ignore[assignment,misc]
    meets = due(EPOCHS * 5)
    assert len({b - a for a, b in zip(sorted(meets), sorted(meets)[1:], strict=False)}) > 1, "one period only"

    def rule(taken: int, replicas: list[nn.Module]) -> None:
        if taken in meets:
            mean(replicas)

    truth = by_hand(net(), adam, rule, 1, 5)
    model, count = net(), iter(range(1, 1000))

    def take(*_: object) -> None:
        Clock.now += seconds_of(next(count), dt.rank())

    model.register_forward_pre_hook(take)
    compare("local(seconds=)", truth, distributed(model, adam, f"local(every=2,seconds={SECONDS})"))
    release()


# Parameters of 16 bits.


def narrow_net() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(48, 50), nn.Tanh(), nn.Linear(50, 3)).bfloat16()
    layers[2].bias = nn.Parameter(layers[2].bias.detach().float())  # one of another type among them
    layers[2].forward = lambda x: F.linear(x, layers[2].weight, layers[2].bias.to(x.dtype))  # type: ignore[method-assign,arg-type,operator]
    return layers


def narrow_steps(models: list[nn.Module], step: int, optimizers: list[torch.optim.Optimizer], first: int) -> None:
    for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        draw = torch.Generator().manual_seed(10 * step + first + place)
        x = torch.randn(4, 48, generator=draw, dtype=torch.float32).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def narrow_truth(*, outer: bool, delay: int = 0) -> list[Tensor]:
    """Rounds every two steps: means in float32, outer parameters kept in it."""
    world = dt.world()
    replicas = [narrow_net() for _ in range(world)]
    optimizers = [sgd(replica) for replica in replicas]
    anchor = [p.detach().float() for p in narrow_net().parameters()]
    speed = [torch.zeros_like(a) for a in anchor]
    stood: list[list[Tensor]] = []
    for step in range(6):
        narrow_steps(replicas, step, optimizers, 0)
        if step % 2:
            columns = zip(*(r.parameters() for r in replicas), strict=True)
            stood = [[v.detach().clone() for v in values] for values in columns]
        if not stood or step % 2 != (1 + delay) % 2:
            continue
        for k, values in enumerate(zip(*(r.parameters() for r in replicas), strict=True)):
            start = anchor[k].to(values[0].dtype).float()
            if outer or delay:
                moved = in_order([(v.float() - start) / world for v in stood[k]])
                speed[k] = 0.6 * speed[k] - moved
                if outer:  # rounded in this order: otherwise some of the halves of bfloat16 go the other way
                    anchor[k] = anchor[k].add(moved, alpha=0.7).sub(speed[k], alpha=0.7 * 0.6)
                else:
                    anchor[k] = anchor[k] + moved
            else:
                anchor[k] = in_order([v.float() / world for v in stood[k]])
            for value, before in zip(values, stood[k], strict=True):
                value.data.copy_(anchor[k].to(value.dtype).float() + (value.detach().float() - before.float()))
    return [p.detach() for p in replicas[dt.rank()].parameters()]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def narrow() -> None:
    """Means over bfloat16 replicas are those of float32, rounded once."""
    for plan in ("local(every=2)", "diloco(every=2)", "local(every=2),delay=1", "diloco(every=2),delay=1"):
        truth = narrow_truth(outer="diloco" in plan, delay="delay" in plan)
        model = narrow_net()
        model, optimizer = dt.distribute(model, sgd(model), plan=plan, batches="own")
        for step in range(6):
            narrow_steps([model], step, [optimizer], dt.rank())
        assert [p.dtype for p in model.parameters()] == [t.dtype for t in truth]
        pairs = list(zip(truth, (p.detach() for p in model.parameters()), strict=True))
        off = sum(int((a != b).sum()) for a, b in pairs)
        total = sum(a.numel() for a in truth)
        assert off <= total * 0.002, f"{plan}: {off} of {total} bfloat16 numbers from the mean in float32"
        release()


# Another world.

EVERY, BEFORE, AFTER = 3, 5, 6


def leave(folder: Path) -> None:
    _, step = stepping(f"diloco(every={EVERY})")
    for number in range(BEFORE):
        step(number)
    dt.save(folder / "left")
    release()
    _, step = stepping(f"diloco(every={EVERY}),delay={EVERY}")
    for number in range(BEFORE):
        step(number)
    assert dt.stats().backlog == 1
    dt.save(folder / "under way")
    release()
    _, step = stepping("local(every=2,after=4)")
    for number in range(BEFORE):
        step(number)
    dt.save(folder / "post")
    release()


def enter(folder: Path) -> None:
    model, step = stepping("local(every=2,after=4)")
    dt.load(folder / "post")
    assert not here().loop.members[0].sync.lockstep, "four steps together, once more"
    step(BEFORE)
    assert spread(model) > 0
    step(BEFORE + 1)
    assert spread(model) == 0
    release()
    model, step = stepping(f"diloco(every={EVERY})")
    dt.load(folder / "left")
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    compare("diloco in another world", list(in_two_worlds(3, 2)), list(model.parameters()))
    release()
    model, step = stepping(f"diloco(every={EVERY}),delay={EVERY}")
    dt.load(folder / "under way")
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    compare("diloco,delay in another world", list(in_two_worlds(3, 2, late=True)), list(model.parameters()))
    release()


def in_two_worlds(before: int, after: int, *, late: bool = False) -> Iterator[Tensor]:
    """DiLoCo by hand: the outer parameters and their momentum stay, what replicas have becomes its mean.

    `late`: what a round means is done at the next one, or where the world changes.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    outer = [p.detach().clone() for p in model.parameters()]
    speed = [torch.zeros_like(p) for p in outer]
    replicas = [copy.deepcopy(model) for _ in range(before)]
    optimizers = [adam(replica) for replica in replicas]
    stood: list[list[Tensor]] = []

    def meet() -> None:
        for k, (values, there) in enumerate(
            zip(zip(*(r.parameters() for r in replicas), strict=True), stood, strict=True)
        ):
            moved = sum(v - outer[k] for v in there) / len(there)
            speed[k] = 0.6 * speed[k] - moved
            outer[k] = outer[k] + 0.7 * (moved - 0.6 * speed[k])
            for value, before_ in zip(values, there, strict=True):
                value.data.copy_(outer[k] + (value.data - before_))
        stood.clear()

    for number in range(BEFORE + AFTER):
        if number == BEFORE:
            if stood:
                meet()
            replicas, optimizers = averaged(replicas, optimizers, after)
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * number + rank))
            replica(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % EVERY == 0:
            if stood:
                meet()
            every_one = zip(*(r.parameters() for r in replicas), strict=True)
            stood.extend([value.detach().clone() for value in values] for values in every_one)
            if not late:
                meet()
    yield from replicas[dt.rank()].parameters()


def averaged(
    replicas: list[nn.Module], optimizers: list[torch.optim.Optimizer], count: int
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    mean(replicas)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    middle = {
        k: {name: sum(state[k][name] for state in states) / len(states) for name in one} for k, one in states[0].items()
    }
    new = [copy.deepcopy(replicas[0]) for _ in range(count)]
    made = [adam(replica) for replica in new]
    for optimizer in made:
        optimizer.load_state_dict(copy.deepcopy({**optimizer.state_dict(), "state": middle}))
    return new, made


# What does not fit, and what is said.


def misfit(folder: Path) -> None:
    """What was saved for a rank is looked at before anything of it is taken."""
    own_state = Local.own_state
    Local.own_state = lambda self: {**own_state(self), "parameter/0": torch.zeros(1)}  # type: ignore[method-assign]
    _, step = stepping("local(every=3)")
    step(0)
    dt.save(folder / "forged")
    release()
    Local.own_state = own_state  # type: ignore[method-assign]
    stepping("local(every=3)")
    with pytest.raises(dt.CheckpointError, match=r"rank \d alone[^$]*parameter/0 \(saved \(1,\) float64, here"):
        dt.load(folder / "forged")
    release()
    for number, plan in enumerate(("zero1,wire=topk(0.1)", "wire=topk(0.1)", "local(every=1),wire=sign")):
        _, step = stepping(plan)
        step(0)
        dt.save(folder / str(number))
        release()
        os.environ[BUCKET_BYTES] = "256"
        stepping(plan)
        with pytest.raises(dt.CheckpointError, match=f"saved with {BUCKET_BYTES} not set"):
            dt.load(folder / str(number))
        release()
        del os.environ[BUCKET_BYTES]
    _, step = stepping("wire=topk(0.1)")
    step(0)
    sync = here().loop.members[0].sync
    sync.take_own_state({k: v[1:] if v.dim() else v for k, v in sync.own_state().items()})
    with pytest.raises(dt.CheckpointError, match="the checkpoint has 'sent/gradients"):
        step(1)


def scored() -> None:
    """An evaluation of replicas that differ says so, once."""
    for plan in ("local(every=3)", "gossip", "server", "server(staleness=0)"):
        for first in (False, True):
            model = net()
            model, optimizer, data = dt.distribute(model, adam(model), rows(), plan=plan)
            for x, y in data:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if first:
                dt.sync()
            for _ in range(2):
                dt.evaluate(model, rows(), {"error": lambda a, b: (a - b).square().mean(dim=1)})
            release()


def sabotage(what: str) -> None:
    if what == "another pace":
        Local.pace = lambda self: 0.1  # type: ignore[method-assign]
    elif what == "in 16 bits":
        for module in (loose, rounds):
            module.wide = lambda tensor: tensor  # type: ignore[attr-defined]
    elif what == "begin anew":
        Diloco.common = ()
    elif what == "never ends":
        Diloco._end_in_another_world = lambda self, *given: None  # type: ignore[method-assign]


def main(what: str, folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in words:
        sabotage(word)
    acts = {"clock": by_clock, "narrow": narrow, "scored": scored}
    more = {"leave": leave, "enter": enter, "misfit": misfit}
    acts[what]() if what in acts else more[what](folder)
    dt.print(f"{what} as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
