"""What each process of a pool runs: rows of tables that count by how often replicas use them, and that written out.

`-m tests.conformance.cold_rows_pool FOLDER [WORDS]`: faults raise. `all alike`: every replica counts for as much.
`from here`: how often rows were used is forgotten. `not saved`: a checkpoint has nothing of it. `plain mean`: what
other plans begin with. `shared counts double`: in another world. `after the step`: gradients are looked at then.
`forget`: wires do not keep what they leave out.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.diloco import Diloco
from distributedtorch.sync.loose import Loose
from distributedtorch.sync.rounds import Rounds
from distributedtorch.sync.used import UsedRows
from tests.conformance.loose_pool import adam, compare, every
from tests.conformance.loose_pool import check as check_rounds
from tests.conformance.wires_pool import forget

NUMBER, STEPS = 12, 14
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(*, sparse: bool = False) -> nn.Sequential:
    """Two tables, of which the second is the output layer too: every step uses all of that."""
    torch.manual_seed(1)
    first, second = nn.Embedding(NUMBER, 4, sparse=sparse), nn.EmbeddingBag(5, 4, mode="sum")
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 5, bias=False), second)
    model[4].weight = second.weight
    return model


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    """Rows that nobody uses move too, in all replicas."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=2.0)


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
        self.last = 0.0 if make is adagrad else 0.01 if make is rms else 0.001
        """1 - beta2."""
        self.agreed = [p.detach().clone() for p in net().parameters()]
        self.speed = [torch.zeros_like(value) for value in self.agreed]
        self.steps, self.counts = 0, [[0] * NUMBER for _ in range(dt.world())]
        self.under_way: list[tuple[list[Tensor], Tensor]] = []

    def ends(self, *, after: int = 0, window: int = 1, sparse: bool = False) -> list[Tensor]:
        """The present rank's values; for `after` steps gradients are averaged."""
        self.replicas = [net(sparse=sparse) for _ in range(dt.world())]
        optimizers = [self.make(replica) for replica in self.replicas]
        for step in range(STEPS):
            for rank, replica in enumerate(self.replicas):
                numbers = range(step * window, (step + 1) * window)
                for number in numbers:
                    (loss_of(replica, number, rank) / window).backward()
                for row in {row for number in numbers for row in ids_of(number, rank).flatten().tolist()}:
                    self.counts[rank][row] += step >= after
            self.steps += step >= after
            if step < after:
                self.average_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step < after:
                self.agreed = [p.detach().clone() for p in self.replicas[0].parameters()]
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

    def weight(self, row: int, rank: int) -> float:
        """What a replica's movement of a row is multiplied by."""
        often = [count[row] / self.steps for count in self.counts]
        if not any(often):
            return 1 / len(often)
        if not often[rank]:
            return 0.0
        pairs = sum(a * b for j, a in enumerate(often) for k, b in enumerate(often) if j != k)
        by_any = 1 - math.prod(1 - one for one in often)
        both = (sum(often) + pairs) * (self.last / by_any + 1 - self.last)
        return ((self.last + (1 - self.last) * often[rank]) / both) ** 0.5

    def begin(self) -> None:
        ranks = range(len(self.replicas))
        for index, values in enumerate(zip(*(r.parameters() for r in self.replicas), strict=True)):
            weights = [torch.tensor([[self.weight(row, rank)] for row in range(NUMBER)]) for rank in ranks]
            moves = [value.detach() - self.agreed[index] for value in values]
            moved = sum(w * m if index == 0 else m / len(ranks) for w, m in zip(weights, moves, strict=True))
            self.under_way.append(([value.detach().clone() for value in values], moved))  # type: ignore[arg-type]

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
    model, optimizer = dt.distribute(model, make(model), plan=plan, batches="own")

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
    check("local(every=3,rows=used)", ByHand(adagrad, 3).ends(sparse=True), adagrad, sparse=True)
    check("local(every=3,rows=used)", ByHand(rms, 3).ends(), rms)
    check("local(every=2,rows=used)", ByHand(decaying, 2).ends(), decaying)
    check("diloco(every=3,rows=used)", ByHand(adam, 3, lr=0.7, momentum=0.6).ends())
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


def alike_in_another_world() -> None:
    """DiLoCo goes on in another world in the middle of a round: so far all replicas have moved alike."""
    plan = "diloco(every=8,lr=1.0,momentum=0.001,rows=used)"
    model, step = stepping(plan)
    for k in range(5):
        step(k)
    sync = here().loop.members[0].sync
    state = {name: value.clone() for name, value in sync.own_state().items() if name.startswith(sync.common)}
    for param in model.parameters():
        param.data.copy_(here().comm.exchange("mean", param.detach()).mean(dim=0))
    sync.take_common_state(state)
    step(5)
    mean = [here().comm.exchange("mean", p.detach()).mean(dim=0) for p in model.parameters()]
    anchor = [state[f"anchor/{index}"] for index in range(len(mean))]
    params = here().loop.members[0].sync.params
    order = {id(p): k for k, p in enumerate(params)}
    dt.sync()
    for param, value in zip(model.parameters(), mean, strict=True):
        start = anchor[order[id(param)]]
        wanted = start + (value - start) * 1.001
        assert torch.allclose(param.detach(), wanted, atol=1e-6), "what all have moved counts more than once"
    release()


def wires_leave_out_what_counts() -> None:
    """Once all that a wire has left out has come, replicas are where they would be without the wire."""
    ends = []
    for wire in ("", ",wire=topk(0.1)"):
        model: nn.Module = nn.Embedding(NUMBER, 128)  # fewer numbers would travel as they are
        torch.nn.init.zeros_(model.weight)
        model, optimizer = dt.distribute(
            model, torch.optim.Adagrad(model.parameters(), lr=0.1), plan=f"local(every=2,rows=used){wire}"
        )
        for number in range(60):
            factor = (torch.arange(128.0) + 1) * (number < 8)
            (model(ids_of(number, dt.rank())) * factor).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dt.sync()
        ends.append([model.weight.detach().clone()])
        release()
    compare("what wires have left out", *ends)


def for_sgd_it_is_refused() -> None:
    model = net()
    with pytest.raises(dt.UsageError, match=r"rows=used with SGD(.|\n)*leave rows=used out"):
        dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="local(every=3,rows=used)")
    release()


def optimizers_change_gradients() -> None:
    """Decay added to gradients by an optimizer is no use of rows, and gradients it clears are."""

    class Changing(torch.optim.Adagrad):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            for param in self.param_groups[0]["params"]:
                param.grad.add_(param.detach(), alpha=0.1)
            result = super().step(closure)
            for param in self.param_groups[0]["params"]:
                param.grad = None
            return result

    model = net()
    model, optimizer = dt.distribute(model, Changing(model.parameters()), plan="local(every=3,rows=used)")
    loss_of(model, 0, dt.rank()).backward()
    optimizer.step()
    sync = here().loop.members[0].sync
    assert isinstance(sync, Rounds) and sync.used is not None
    (table,) = (k for k, p in enumerate(sync.params) if len(p) == NUMBER)
    found = set(sync.used.counts[table].nonzero().flatten().tolist())
    assert found == set(ids_of(0, dt.rank()).flatten().tolist()), found
    release()


def without_a_table() -> None:
    """It is said, and changes nothing."""
    check_rounds("local(every=3,rows=used)", every(3))
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
    model["out"].weight = model["table"].weight
    assert counted(model) is None
    release()


def which_tables_count() -> None:
    """Not those that a Linear has too; those of two embeddings do, and of parts that hold a table without using it."""
    model = nn.ModuleDict({name: nn.Embedding(5, 4) for name in ("first", "second", "third")})
    model["out"] = nn.Linear(4, 5, bias=False)
    model["out"].weight, model["second"].weight = model["third"].weight, model["first"].weight
    model["more"] = nn.ParameterList([model["first"].weight])
    used = counted(model)
    assert used is not None and [id(used.params[k]) for k in used.counts] == [id(model["first"].weight)]
    release()


def counted(model: nn.Module) -> UsedRows | None:
    dt.distribute(model, adam(model), plan="local(every=3,rows=used)")
    sync = here().loop.members[0].sync
    assert isinstance(sync, Rounds)
    return sync.used


def used_by_all() -> None:
    """Rows that every replica uses in every step: the plain mean."""
    ends = []
    for words in ("", ",rows=used"):
        torch.manual_seed(3)
        model: nn.Module = nn.Embedding(5, 4)
        model, optimizer = dt.distribute(model, adam(model), plan=f"local(every=2{words})", batches="own")
        for number in range(6):
            draw = torch.Generator().manual_seed(10 * number + dt.rank())
            (model.weight * torch.randn(5, 4, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([model.weight.detach().clone()])
        release()
    compare("rows that all use", *ends)


def sabotage(what: str) -> None:
    if what == "forget":
        forget()
    elif what == "all alike":
        UsedRows.parts = lambda self: {}  # type: ignore[method-assign]
    elif what == "from here":
        parts = UsedRows.parts

        def forgetful(self: UsedRows) -> dict[int, Tensor]:
            found = parts(self)
            self.take_state({})
            return found

        UsedRows.parts = forgetful  # type: ignore[method-assign]
    elif what == "not saved":
        UsedRows.state = lambda self: {}  # type: ignore[method-assign]
    elif what == "plain mean":
        Rounds.consensus = Loose.consensus  # type: ignore[method-assign,assignment]
    elif what == "shared counts double":
        fill = Diloco.take_common_state

        def alone(self: Diloco, state: Mapping[str, Tensor]) -> None:
            fill(self, state)
            assert self.used is not None
            self.used.alike.fill_(False)

        Diloco.take_common_state = alone  # type: ignore[method-assign]
    elif what == "after the step":
        UsedRows.note, note = lambda self: None, UsedRows.note  # type: ignore[method-assign]
        update = Rounds.update

        def late(self: Rounds, step: Callable[[], object]) -> object:
            def both() -> object:
                result = step()
                note(self.used)  # type: ignore[arg-type]
                return result

            return update(self, both)

        Rounds.update = late  # type: ignore[method-assign]


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
    alike_in_another_world()
    wires_leave_out_what_counts()
    optimizers_change_gradients()
    for_sgd_it_is_refused()
    without_a_table()
    which_tables_count()
    used_by_all()
    dt.print("cold rows as written out")
