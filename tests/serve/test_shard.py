"""What a server does with pushes and gives for pulls, without processes: rates, rows, codes, answers that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributedtorch.core.wire import Code
from distributedtorch.serve import rates
from distributedtorch.serve.board import Push, Refused
from distributedtorch.serve.coded import Copies
from distributedtorch.serve.parcel import ABSENT, Form, Item, joined, key, parted, plain, rows, sparse
from distributedtorch.serve.shard import Brought, Shard
from distributedtorch.serve.terms import Terms
from distributedtorch.wire.quantize import Int8
from distributedtorch.wire.sparsify import TopK

WORLD = 3


def shard(params: Sequence[nn.Parameter], make: Any = None, *, code: Code | None = None, **terms: Any) -> Shard:
    optimizer = (make or (lambda given: torch.optim.SGD(given, lr=0.5)))(list(params))
    items = [Item(param, table=param.dim() == 2, code=code) for param in params]
    return Shard(params, optimizer, items, Terms(**terms), WORLD)


def push(*values: Tensor, worker: int = 0, pulled: int = 0, late: int = 0, options: Sequence[float] = ()) -> Push:
    content = Brought(values=list(values), options=list(options))
    return Push(worker=worker, step=pulled + late + 1, pulled=pulled, late=late, content=content)


def vector(*numbers: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(numbers, dtype=torch.float64))


def taken(worker: int, item: Item, message: Tensor, version: int, place: Tensor) -> Form:
    """What a worker makes of an answer."""
    form, data = parted(message, 1)[0]
    item.take(form, data, key("pull", worker, 0, version), place)
    return form


@pytest.mark.parametrize(("late", "rate"), [(0, 0.5), (1, 0.5), (2, 0.25), (5, 0.1)])
def test_rates_by_staleness(late: int, rate: float) -> None:
    one = shard([vector(1.0, 2.0)], rates="staleness")
    one.apply([push(torch.tensor([1.0, -1.0]).double(), late=late)])
    assert torch.allclose(one.masters[0].detach(), torch.tensor([1.0 - rate, 2.0 + rate]).double())
    one.apply([push(torch.tensor([0.0, 1.0]).double(), pulled=late + 1)])
    assert torch.allclose(one.masters[0].detach()[1], torch.tensor(2.0 + rate - 0.5).double()), "the rate stays divided"


def test_options_there_and_back() -> None:
    given = torch.optim.AdamW([vector(1.0)], lr=torch.tensor(0.1), betas=(0.5, 0.25), foreach=False)
    torch.optim.lr_scheduler.StepLR(given, 1)  # adds to the groups
    numbers = rates.numbers(given)
    assert numbers == pytest.approx([0.1, 0.5, 0.25, 1e-8, 0.01], rel=1e-6)
    rates.put(given, [0.2, 0.75, 0.5, 1e-6, 0.0])
    group = given.param_groups[0]
    assert group["betas"] == (0.75, 0.5) and group["weight_decay"] == 0.0 and isinstance(group["lr"], Tensor)
    for wrong, said in ((numbers[:-1], "another optimizer"), ([*numbers[:-1], float("nan")], "NaN or infinite")):
        with pytest.raises(Refused, match=said):
            rates.read(plain(torch.tensor(wrong, dtype=torch.float64))[1], given)  # type: ignore[arg-type]


def test_rates_of_a_round() -> None:
    one = shard([vector(0.0, 0.0)], rates="own", staleness=0)
    names = rates.numbers(one.user)
    options = [[rate, *names[1:]] for rate in (0.1, 0.3)]
    grads = torch.eye(2, dtype=torch.float64)
    one.apply([push(grads[w], worker=w, options=options[w]) for w in range(2)])
    assert torch.allclose(one.masters[0].detach(), -torch.tensor([0.05, 0.15]).double())


def test_changes_are_added() -> None:
    for staleness, pushes, moved in ((None, 1, 1 / WORLD), (0, 2, 1.0)):
        one = shard([vector(1.0)], push="updates", staleness=staleness)
        one.apply([push(torch.tensor([1.0]).double(), worker=w) for w in range(pushes)])
        assert torch.allclose(one.masters[0].detach(), torch.tensor([1.0 + moved]).double())


def table_push(numbers: list[int], value: float, version: int) -> Push:
    values = torch.full((len(numbers), 2), value, dtype=torch.float64)
    return push(sparse(torch.tensor(numbers), values, (40, 2)), pulled=version)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_only_changed_rows_go(momentum: float) -> None:
    """Momentum moves rows that the gradient does not have."""
    param = nn.Parameter(torch.zeros(40, 2, dtype=torch.float64))
    one = shard([param], lambda given: torch.optim.SGD(given, lr=0.5, momentum=momentum))
    item, place = one.items[0], torch.zeros(40, 2, dtype=torch.float64)
    one.told(0, -1)
    assert taken(0, item, one.give(0, 0), 0, place) is Form.PLAIN
    held = 0
    for version, numbers in enumerate([[1, 5], [5, 9], [30], [2]]):
        one.apply([table_push(numbers, 1.0, version)])
        if version == 1:
            continue  # this worker is elsewhere
        one.told(0, held)
        message = one.give(0, version + 1)
        assert taken(0, item, message, version + 1, place) is Form.ROWS
        held = version + 1
        assert torch.equal(place, one.masters[0].detach())
    one.told(0, held)
    assert parted(one.give(0, held), 1)[0][0] is Form.NONE
    for unknown in (-1, held + 1):
        one.told(0, unknown)
        assert parted(one.give(0, held), 1)[0][0] is Form.PLAIN


def test_nothing_of_a_bad_push_is_used() -> None:
    one = shard([vector(1.0, 2.0), nn.Parameter(torch.zeros(40, 2, dtype=torch.float64))])
    bad = sparse(torch.tensor([3, 2]), torch.ones(2, 2, dtype=torch.float64), (40, 2))
    data = torch.cat([bad._indices()[0].view(torch.uint8), bad._values().view(-1).view(torch.uint8)])
    good = plain(torch.ones(2, dtype=torch.float64))
    for part, said in (
        ((Form.ROWS, data), "rising order"),
        (plain(torch.zeros(40, 2, dtype=torch.float64)), "in the form PLAIN"),
        (rows(sparse(torch.tensor([1]), torch.full((1, 2), torch.nan).double(), (40, 2))), "NaN"),
    ):
        with pytest.raises(Refused, match=said):
            one.read(0, 1, joined([good, part]))
    with pytest.raises(Refused, match="another model"):
        one.read(0, 1, joined([good]))
    assert one.read(0, 1, joined([good, ABSENT])).values[1] is None
    assert one.largest >= joined([good, rows(sparse(torch.arange(40), torch.zeros(40, 2).double(), (40, 2)))]).numel()


class Worker:
    """One that follows a server's answers, some of which do not arrive."""

    def __init__(self, server: Shard) -> None:
        self.server, self.held, self.value = server, -1, torch.zeros_like(server.masters[0]).detach()

    def ask(self, version: int, *, arrives: bool = True) -> Form:
        self.server.told(1, self.held)
        message = self.server.give(1, version)
        form = parted(message, 1)[0][0]
        if arrives:
            taken(1, self.server.items[0], message, version, self.value)
            self.held = version
        return form


def drifting(code: Code) -> tuple[Shard, Worker]:
    one = shard([nn.Parameter(torch.randn(2000, dtype=torch.float64))], code=code)
    return one, Worker(one)


@pytest.mark.parametrize("code", [TopK(0.2), Int8()])
def test_lost_answers(code: Code) -> None:
    """Server and worker have the same copy, whichever answers are lost, asked for again, or come when others did."""
    torch.manual_seed(0)
    one, worker = drifting(code)
    forms = []
    for version in range(40):
        arrives = version % 3 != 1
        forms.append(worker.ask(version, arrives=arrives))
        if version % 5 == 0:
            forms.append(worker.ask(version))  # the same version again
        one.apply([push(torch.randn(2000).double(), worker=1, pulled=version)])
    worker.ask(40)
    worker.server.told(1, worker.held)
    assert torch.equal(one.copies.of[1].values[0], worker.value), "two copies"
    assert forms.count(Form.CODE) > 25 and forms.count(Form.PLAIN) == 1 and Form.NONE in forms
    gap = float((worker.value - one.masters[0].detach()).norm())
    worker.held = -1
    assert worker.ask(40) is Form.PLAIN and torch.equal(worker.value, one.masters[0].detach()) and gap > 0


def test_a_server_that_takes_a_lost_answer_for_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Copies.told

    def believes(self: Copies, worker: int, held: int) -> None:
        copy = self.of.get(worker)
        told(self, worker, copy.sent_version if copy is not None and copy.sent else held)

    monkeypatch.setattr(Copies, "told", believes)
    with pytest.raises(AssertionError, match="two copies"):
        test_lost_answers(TopK(0.2))


def test_a_delay_is_compensated_from_what_the_worker_had() -> None:
    torch.manual_seed(0)
    one = shard([nn.Parameter(torch.randn(2000, dtype=torch.float64))], code=TopK(0.1), compensate=0.1)
    worker = Worker(one)
    worker.ask(0)
    one.apply([push(torch.randn(2000).double(), worker=0)])
    worker.ask(1)
    one.apply([push(torch.randn(2000).double(), worker=0, pulled=1)])
    one.told(1, worker.held)
    grad, before = torch.randn(2000).double(), one.masters[0].detach().clone()
    one.apply([one.compensated(push(grad, worker=1, pulled=1, late=1))])
    moved = grad + 0.1 * grad.square() * (before - worker.value)
    assert torch.allclose(one.masters[0].detach(), before - 0.5 * moved)
