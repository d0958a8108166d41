"""What each process of a pool runs: rounds that travel beside the next steps, and the same written out by hand.

`-m tests.conformance.underway_pool [WORDS]`: faults raise. `at once`: a round ends when it is begun. `all of it`:
replicas forget what they have moved since. `nobody asked`: a load in between is not told. `waits`: every step waits for
what travels. `one at a time`: second sums begin at a round's end. `never let go`: a round outlives a load.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.comm import Pending
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync import loose
from distributedtorch.sync.rounds import Rounds
from distributedtorch.sync.underway import UnderWay
from distributedtorch.wire.twice import Twice
from tests.conformance.loose_pool import Rule, check, mean, net, sgd, spread, stepping


def late(every: int, delay: int, *, after: int = 0, lr: float = 1.0, momentum: float = 0.0, norm: bool = False) -> Rule:
    """Where replicas are on average they go so many steps later, with what each has moved since."""
    agreed = [p.detach().clone() for p in net(norm=norm).parameters()]
    speed = [torch.zeros_like(value) for value in agreed]
    stood: list[list[Tensor]] = []

    def end(replicas: list[nn.Module]) -> None:
        for index, values in enumerate(zip(*(r.parameters() for r in replicas), strict=True)):
            gradient = agreed[index] - sum(stood[index]) / len(replicas)
            speed[index] = momentum * speed[index] + gradient
            agreed[index] = agreed[index] - lr * (gradient + momentum * speed[index])
            for value, before in zip(values, stood[index], strict=True):
                value.data.add_(agreed[index] - before)
        for values in zip(*(r.buffers() for r in replicas), strict=True):
            middle = sum(values) / len(values)
            for value in values if values[0].is_floating_point() else ():
                value.copy_(middle)  # type: ignore[arg-type]
        stood.clear()

    def rule(taken: int, replicas: list[nn.Module]) -> None:
        since = taken - after
        if since <= 0:
            mean(replicas)
            agreed[:] = [p.detach().clone() for p in replicas[0].parameters()]
            return
        if stood and since % every == delay % every:
            end(replicas)
        if since % every == 0:
            every_one = zip(*(r.parameters() for r in replicas), strict=True)
            stood.extend([value.detach().clone() for value in values] for values in every_one)

    return rule


def as_written_out() -> None:
    check("local(every=1),delay=1", late(1, 1))
    check("local(every=3),delay=1", late(3, 1))
    check("local(every=3),delay=2", late(3, 2))
    check("local(every=3),delay=3", late(3, 3))
    check("local(every=2),delay=1,accumulate=2", late(2, 1), window=2)
    check("local(every=3),delay=1", late(3, 1, norm=True), sgd, norm=True)
    check("local(every=3,after=4),delay=2", late(3, 2, after=4), together_for=4)
    check("diloco(every=3),delay=2", late(3, 2, lr=0.7, momentum=0.6))
    check("diloco(every=4,lr=1.0,momentum=0.5),delay=1", late(4, 1, lr=1.0, momentum=0.5))


def nobody_waits() -> None:
    """Between its beginning and its end no step waits for a round; `dt.sync` ends it, and one more."""
    waited: list[str] = []
    wait = Pending.wait

    def seen(self: Pending) -> None:
        waited.append(self.name)
        wait(self)

    model, step = stepping("local(every=4),delay=3")
    Pending.wait = seen  # type: ignore[method-assign]
    for number in range(4):
        step(number)
    assert dt.stats().backlog == 1 and dt.stats().bytes_held["under way"] > 0
    waited.clear()
    step(4)
    step(5)
    assert not any(name.startswith("round/") for name in waited), waited
    before = [p.detach().clone() for p in model.parameters()]
    middle = here().comm.exchange("before", torch.cat([p.view(-1) for p in before])).mean(dim=0)
    dt.sync()
    Pending.wait = wait  # type: ignore[method-assign]
    assert any(name.startswith("round/") for name in waited), waited
    found = torch.cat([p.detach().view(-1) for p in model.parameters()])
    assert spread(model) == 0 and torch.allclose(found, middle, atol=1e-12), "not the mean of replicas"
    assert dt.stats().backlog == 0 and dt.stats().bytes_held["under way"] == 0
    release()


def the_period_follows() -> None:
    for most in (1e3, 1e-9):
        _, step = stepping(f"local(every=4,drift={most}),delay=2")
        for number in range(7):
            step(number)
        sync = here().loop.members[0].sync
        assert isinstance(sync, Rounds) and (sync.period == 8 if most > 1 else sync.period == 2), sync.period
        release()


def loads_are_no_movement() -> None:
    """Values that are put into one rank's parameters while a round is under way."""
    model, step = stepping("diloco(every=3),delay=2")
    for number in range(4):
        step(number)
    assert here().loop.members[0].sync.backlog == 1
    if dt.rank() == dt.world() - 1:
        model.load_state_dict(model.state_dict())
    before = torch.cat([p.detach().view(-1) for p in model.parameters()])
    middle = here().comm.exchange("before", before).mean(dim=0)
    dt.sync()
    found = torch.cat([p.detach().view(-1) for p in model.parameters()])
    assert spread(model) == 0 and torch.allclose(found, middle, atol=1e-12), "a load is no movement"
    step(4)
    release()


def letting_go_ends_it() -> None:
    """A plan that ends with a round under way leaves plain, equal parameters, and the next one begins anew."""
    model, step = stepping("local(every=3),delay=2,wire=int4")
    for number in range(4):
        step(number)
    release()
    assert spread(model) == 0


def second_sums_begin_on_the_way() -> None:
    """powersgd sums twice: the second sums begin as soon as somebody asks, and change nothing of what comes."""
    ends = []
    for asked in (True, False):
        model, step = stepping("local(every=4),delay=3,wire=powersgd(rank=2)")
        for number in range(4):
            step(number)
        sync = here().loop.members[0].sync
        assert isinstance(sync, Rounds) and sync.under_way is not None
        bring_on = UnderWay.bring_on
        twice = [one for each in sync.under_way.sums for one in each.pending if isinstance(one, Twice)]
        assert twice, "nothing is summed twice"
        if asked:
            for _ in range(10_000):
                sync.under_way.bring_on()
                begun = torch.tensor(all(one.second is not None for one in twice))
                if bool(here().comm.exchange("begun", begun).all()):
                    break
            else:
                raise AssertionError("second sums wait for the end of a round")
        else:
            UnderWay.bring_on = lambda self: None  # type: ignore[method-assign]
        for number in range(4, 8):
            step(number)
        UnderWay.bring_on = bring_on  # type: ignore[method-assign]
        ends.append([p.detach().clone() for p in model.parameters()])
        release()
    assert all(map(torch.equal, *ends)), "what comes hangs on who asks"


def an_earlier_state_has_no_round_under_way() -> None:
    """Taken back, by another world's checkpoint, to where replicas step together."""
    _, step = stepping("local(every=3,after=2),delay=2")
    for number in range(6):
        step(number)
    sync = here().loop.members[0].sync
    assert sync.backlog == 1
    sync.loaded()
    sync.take_common_state({"steps": torch.tensor(0)})
    assert sync.backlog == 0 and sync.lockstep, "a round is under way where replicas step together"
    step(6)
    release()


def sabotage(what: str) -> None:
    if what == "one at a time":
        UnderWay.bring_on = lambda self: None  # type: ignore[method-assign]
    elif what == "never let go":
        Rounds._let_go = lambda self: None  # type: ignore[method-assign]
    elif what == "at once":
        agree = Rounds.agree

        def ended(self: Rounds) -> None:
            agree(self)
            if self.under_way is not None:
                self._end_round(self.under_way)

        Rounds.agree = ended  # type: ignore[method-assign]
    elif what == "all of it":
        end = Rounds._end_round

        def forgetful(self: Rounds, ended: UnderWay) -> None:
            ended.stood = [p.detach().clone() for p in self.params]
            end(self, ended)

        Rounds._end_round = forgetful  # type: ignore[method-assign]
    elif what == "nobody asked":
        Rounds.loaded = lambda self: None  # type: ignore[method-assign]
    elif what == "waits":
        UnderWay.bring_on = UnderWay.moved  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    loose._PIECE = 10  # parameters are cut
    for word in sys.argv[1:]:
        sabotage(word)
    as_written_out()
    nobody_waits()
    the_period_follows()
    loads_are_no_movement()
    letting_go_ends_it()
    second_sums_begin_on_the_way()
    an_earlier_state_has_no_round_under_way()
    dt.print("rounds under way as written out")
