"""What each process of a pool runs: rows of tables averaged over the replicas that used them, and that written out.

`-m tests.conformance.cold_rows_pool FOLDER [WORDS]`: faults raise. `over all`: rows are averaged over all replicas.
`never reset`: what was used once stays so. `not saved`: a checkpoint has nothing of it. `twice`: a round under way is
divided again when it ends. `plain mean`: what other plans begin with.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.loose import Loose
from distributedtorch.sync.rounds import Rounds
from distributedtorch.sync.underway import UnderWay
from distributedtorch.sync.used import UsedRows
from tests.conformance.loose_pool import adam, compare, every, sgd, spread
from tests.conformance.loose_pool import check as check_rounds

NUMBER, STEPS = 12, 14
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(*, sparse: bool = False) -> nn.Sequential:
    """Two tables, of which the second is the output layer too: every step uses all of that."""
    torch.manual_seed(1)
    first, second = nn.Embedding(NUMBER, 4, sparse=sparse), nn.EmbeddingBag(5, 4, mode="sum")
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 5, bias=False), second)
    model[4].weight = second.weight
    return model


def ids_of(step: int, rank: int) -> Tensor:
    """Four tokens: of the first three by everybody, some by this rank alone, the last two by nobody."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    shared = torch.randint(3, (2, 1), generator=draw)
    own = 3 + (torch.randint(2, (2, 1), generator=draw) * 4 + rank) % (NUMBER - 5)
    return torch.cat([shared, own], dim=1)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    ids = ids_of(step, rank)
    hidden = model[:5](ids)  # type: ignore[index]
    return (hidden + model[5](ids % 5).sum()).sub(ids.sum()).square().mean()  # type: ignore[index]


class ByHand:
    """All replicas in one process: `delay` steps after each `every` they go where they have met."""

    def __init__(self, make: Make, every: int, *, delay: int = 0, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.make, self.every, self.delay, self.lr, self.momentum = make, every, delay, lr, momentum
        self.agreed = [p.detach().clone() for p in net().parameters()]
        self.speed = [torch.zeros_like(value) for value in self.agreed]
        self.users = [set[int]() for _ in range(dt.world())]
        self.under_way: list[tuple[list[Tensor], Tensor]] = []

    def ends(self, *, after: int = 0, window: int = 1, sparse: bool = False) -> list[Tensor]:
        """The present rank's values; for `after` steps gradients are averaged."""
        self.replicas = [net(sparse=sparse) for _ in range(dt.world())]
        optimizers = [self.make(replica) for replica in self.replicas]
        for step in range(STEPS):
            for rank, replica in enumerate(self.replicas):
                for number in range(step * window, (step + 1) * window):
                    (loss_of(replica, number, rank) / window).backward()
                    self.users[rank] |= set(ids_of(number, rank).flatten().tolist())
            if step < after:
                self.average_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step < after:
                self.agreed = [p.detach().clone() for p in self.replicas[0].parameters()]
                self.users = [set() for _ in self.replicas]
            else:
                self.stepped(step + 1 - after)
        return [p.detach() for p in self.replicas[dt.rank()].parameters()]

    def average_gradients(self) -> None:
        for params in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            mean = sum(p.grad for p in params) / len(params)
            for param in params:
                param.grad = mean.clone()

    def stepped(self, alone: int) -> None:
        if self.under_way and alone % self.every == self.delay:
            self.end()
        if alone % self.every == 0:
            self.begin()
            if not self.delay:
                self.end()

    def begin(self) -> None:
        """What all replicas together have moved: of the table's rows, divided by how many used them."""
        world = len(self.replicas)
        counts = [sum(row in some for some in self.users) or world for row in range(NUMBER)]
        self.users = [set() for _ in self.replicas]
        for index, values in enumerate(zip(*(r.parameters() for r in self.replicas), strict=True)):
            total = sum(value.detach() - self.agreed[index] for value in values)
            by = torch.tensor(counts).view(-1, 1) if index == 0 else world
            self.under_way.append(([value.detach().clone() for value in values], total / by))

    def end(self) -> None:
        for index, values in enumerate(zip(*(r.parameters() for r in self.replicas), strict=True)):
            stood, moved = self.under_way[index]
            self.speed[index] = self.momentum * self.speed[index] - moved
            self.agreed[index] = self.agreed[index] + self.lr * (moved - self.momentum * self.speed[index])
            for value, before in zip(values, stood, strict=True):
                value.data.add_(self.agreed[index] - before)
        self.under_way.clear()


def stepping(plan: str, make: Make = adam, *, window: int = 1, sparse: bool = False) -> tuple[nn.Module, Callable]:
    model = net(sparse=sparse)
    model, optimizer = dt.distribute(model, make(model), plan=plan)

    def step(number: int) -> None:
        for part in range(window):
            loss_of(model, number * window + part, dt.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, step


def check(plan: str, truth: list[Tensor], make: Make = adam, *, window: int = 1, sparse: bool = False) -> None:
    model, step = stepping(plan, make, window=window, sparse=sparse)
    for number in range(STEPS):
        step(number)
    compare(plan, truth, [p.detach().clone() for p in model.parameters()])
    release()


def as_written_out() -> None:
    check("local(every=3,rows=used)", ByHand(adam, 3).ends())
    check("local(every=1,rows=used)", ByHand(adam, 1).ends())
    check("local(every=4,rows=used),delay=2", ByHand(adam, 4, delay=2).ends())
    check("local(every=3,after=4,rows=used)", ByHand(adam, 3).ends(after=4))
    check("local(every=2,rows=used),accumulate=2", ByHand(adam, 2).ends(window=2), window=2)
    check("local(every=3,rows=used)", ByHand(sgd, 3).ends(sparse=True), sgd, sparse=True)
    check("diloco(every=3,rows=used)", ByHand(adam, 3, lr=0.7, momentum=0.9).ends())
    check("diloco(every=4,lr=1.0,momentum=0.5,rows=used),delay=1", ByHand(adam, 4, delay=1, momentum=0.5).ends())


def saved(folder: Path) -> None:
    """In the middle of a round, also with one under way: all goes on to the same bits."""
    for number, plan in enumerate(
        (
            "local(every=5,rows=used)",
            "local(every=5,rows=used),wire=int4",
            "local(every=3,rows=used),delay=2",
            "diloco(every=5,rows=used)",
        )
    ):
        there = str(folder / str(number))
        model, step = stepping(plan)
        for k in range(4):
            step(k)
        dt.save(there)
        for k in range(4, 8):
            step(k)
        truth = [p.detach().clone() for p in model.parameters()]
        release()
        model, step = stepping(plan)
        step(9)  # forgotten by the load
        dt.load(there)
        for k in range(4, 8):
            step(k)
        assert all(map(torch.equal, truth, model.parameters())), f"{plan}: goes on in another way after dt.load"
        release()


def others_begin_where_all_would_meet(folder: Path) -> None:
    """What another plan takes from a checkpoint is what `dt.sync` would leave."""
    for number, plan in enumerate(("local(every=5,rows=used)", "local(every=3,rows=used),delay=2")):
        there = str(folder / f"met {number}")
        model, step = stepping(plan)
        for k in range(4):
            step(k)
        dt.save(there)
        dt.sync()
        met = [p.detach().clone() for p in model.parameters()]
        release()
        model, _ = stepping("ddp")
        dt.load(there)
        compare(f"{plan}, then ddp", met, list(model.parameters()))
        release()


def a_load_is_no_movement() -> None:
    """Values that one rank loads, in a checkpoint too: replicas take the plain mean then."""
    model, step = stepping("local(every=5,rows=used)")
    for k in range(3):
        step(k)
    if dt.rank() == 0:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    sync = here().loop.members[0].sync
    before = torch.cat([p.detach().view(-1) for p in model.parameters()])
    mean = here().comm.exchange("before", before).mean(dim=0)
    found = sync.consensus()
    stands = torch.cat([found[id(p)].view(-1) for p in model.parameters()])
    dt.sync()
    after = torch.cat([p.detach().view(-1) for p in model.parameters()])
    assert torch.allclose(after, mean, atol=1e-12) and torch.allclose(stands, mean, atol=1e-12)
    release()


def ended() -> None:
    """Letting go and a load leave equal replicas, and what was used before is no matter afterwards."""
    model, step = stepping("local(every=5,rows=used),delay=2")
    for k in range(6):
        step(k)
    release()
    assert spread(model) == 0
    model, step = stepping("local(every=4,rows=used)")
    step(0)
    model.load_state_dict(copy.deepcopy(net().state_dict()))
    dt.sync()
    sync = here().loop.members[0].sync
    assert isinstance(sync, Rounds) and sync.used is not None
    assert not any(bool(flags.any()) for flags in sync.used.flags.values()), "a load leaves rows marked as used"
    release()


def without_a_table() -> None:
    """It is said, and changes nothing."""
    check_rounds("local(every=3,rows=used)", every(3))


def sabotage(what: str) -> None:
    if what == "over all":
        weights = UsedRows.weights
        UsedRows.weights = lambda self: {k: torch.ones_like(v) for k, v in weights(self).items()}  # type: ignore[method-assign]
    elif what == "never reset":
        UsedRows.forget = lambda self: None  # type: ignore[method-assign]
    elif what == "not saved":
        UsedRows.state = lambda self: {}  # type: ignore[method-assign]
    elif what == "plain mean":
        Rounds.consensus = Loose.consensus  # type: ignore[method-assign,assignment]
    elif what == "twice":
        moved = UnderWay.moved

        def again(self: UnderWay) -> list[Tensor]:
            found = moved(self)
            for index, weight in self.weights.items():
                found[index].mul_(weight)
            return found

        UnderWay.moved = again  # type: ignore[method-assign]


if __name__ == "__main__":
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in sys.argv[2:]:
        sabotage(word)
    as_written_out()
    saved(Path(sys.argv[1]))
    others_begin_where_all_would_meet(Path(sys.argv[1]))
    a_load_is_no_movement()
    ended()
    without_a_table()
    dt.print("cold rows as written out")
