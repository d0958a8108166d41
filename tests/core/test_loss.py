"""Every refusal of a loss is right: the mean over ranks of its gradients is not that of one process, in any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError
from distributedtorch.core.loss import Kind, _Reader, over_rows, read
from distributedtorch.core.step import Loop

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
CLASSES = 4


def each(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss for every step of every row."""
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def probabilities(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).softmax(-1)


def entropy(p: Tensor) -> Tensor:
    return (p * p.log()).sum()


def slopes(m: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(m(x).square().sum(), x, create_graph=True)[0]


class Mean(torch.autograd.Function):
    """A mean over rows that the graph does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape) / ctx.shape[0]


FORMS: dict[str, Loss] = {
    "cross entropy": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y),
    "flat": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weights of classes": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), torch.arange(1.0, 5)),
    "ignored": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=0),
    "sum over steps": lambda m, x, y: each(m, x, y).sum(1).mean(),
    "mean of steps, then sum": lambda m, x, y: each(m, x, y).mean(1).sum(),
    "mean over rows, then sum": lambda m, x, y: each(m, x, y).mean(0).sum(),
    "sum over rows, then mean": lambda m, x, y: each(m, x, y).sum(0).mean(),
    "means over rows, squared": lambda m, x, y: each(m, x, y).mean(0).square().sum(),
    "sum": lambda m, x, y: each(m, x, y).sum(),
    "sum over rows": lambda m, x, y: each(m, x, y).sum() / len(x),
    "sum over numbers": lambda m, x, y: each(m, x, y).sum() * (1 / y.numel()),
    "half a sum over rows": lambda m, x, y: (0.5 / len(x)) * each(m, x, y).sum(),
    "divided before the sum": lambda m, x, y: F.mse_loss(m(x), m(x) * 0 + 1) + (each(m, x, y) / len(x)).sum(),
    "shares before the sum": lambda m, x, y: (
        F.mse_loss(m(x), m(x) * 0 + 1) + (each(m, x, y) * torch.full(y.shape, 1 / len(x))).sum()
    ),
    "mean and sum": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y) + 0.1 * m(x).square().sum(),
    "mean and negated sum of shares": lambda m, x, y: each(m, x, y).mean() - (m(x).mean(-1) / len(x)).sum(),
    "einsum over shares": lambda m, x, y: torch.einsum("bt,bt->", each(m, x, y), torch.full(y.shape, 1 / len(x))),
    "einsum": lambda m, x, y: torch.einsum("bt,bt->", each(m, x, y), torch.ones(y.shape)),
    "dot over shares": lambda m, x, y: each(m, x, y).mean(1) @ (torch.ones(len(x)) / len(x)),
    "product with shares": lambda m, x, y: (
        each(m, x, y).mean() + (torch.full((CLASSES, len(x)), 1 / len(x)) @ m(x).mean(1)).sum()
    ),
    "a function of one's own": lambda m, x, y: -0.3 * Mean.apply(each(m, x, y)).sum(),
    "a function of one's own, added": lambda m, x, y: each(m, x, y).mean() + Mean.apply(m(x).mean((1, 2))).sum(),
    "root": lambda m, x, y: each(m, x, y).mean().sqrt(),
    "roots": lambda m, x, y: each(m, x, y).sqrt().mean(),
    "product": lambda m, x, y: each(m, x, y).mean() * m(x).square().mean(),
    "balance of experts": lambda m, x, y: each(m, x, y).mean() + probabilities(m, x).mean((0, 1)).sum(),
    "squared balance of experts": lambda m, x, y: probabilities(m, x).mean((0, 1)).square().sum(),
    "entropy of the mean": lambda m, x, y: each(m, x, y).mean() + entropy(probabilities(m, x).mean((0, 1))),
    "pulled to a constant": lambda m, x, y: each(m, x, y).mean() + (m.weight - 1).square().sum(),
    "scaled by a parameter": lambda m, x, y: (-m.bias[0]).exp() * each(m, x, y).mean() + m.bias[0],
    "orthogonal": lambda m, x, y: each(m, x, y).mean() + torch.norm(m.weight @ m.weight.T - torch.eye(CLASSES)),
    "spectral": lambda m, x, y: each(m, x, y).mean() + torch.linalg.svdvals(m.weight).log().sum() ** 2,
    "linear by hand": lambda m, x, y: (x @ m.weight.T).square().sum() / len(x),
    "elementwise by hand": lambda m, x, y: (x * m.weight[0]).square().sum(),
    "two heads": lambda m, x, y: torch.stack([each(m, x, y).mean(), m(x).square().mean()]).sum(),
    "largest of two heads": lambda m, x, y: torch.stack([each(m, x, y).mean(), -m(x).square().mean()]).max(),
    "rows one by one": lambda m, x, y: sum(F.mse_loss(o, o * 0 + 1) for o in m(x)) / len(x),
    "sum of rows one by one": lambda m, x, y: sum(F.mse_loss(o, torch.ones(o.shape)) for o in m(x)),
    "steps one by one": lambda m, x, y: sum(F.cross_entropy(o, t) for o, t in zip(m(x).unbind(1), y.T, strict=True)),
    "time first, steps one by one": lambda m, x, y: sum(
        F.cross_entropy(o, t) for o, t in zip(m(x.transpose(0, 1)), y.T, strict=True)
    ),
    "time first, mean over steps": lambda m, x, y: m(x.transpose(0, 1)).square().mean(0).log().mean(),
    "time first, sum over steps": lambda m, x, y: m(x.transpose(0, 1)).square().sum(0).mean(),
    "attention over time": lambda m, x, y: (m(x).softmax(1) * m(x)).sum(1).square().mean(),
    "masked": lambda m, x, y: (each(m, x, y) * (y > 0)).sum() / (y > 0).sum(),
    "masked by a float": lambda m, x, y: (each(m, x, y) * (y > 0).double()).sum() / (y > 0).sum().double(),
    "chosen": lambda m, x, y: each(m, x, y)[y > 0].mean(),
    "chosen steps": lambda m, x, y: each(m, x, y)[:, 1:].mean(),
    "every other row": lambda m, x, y: each(m, x, y)[::2].mean(),
    "means of masked rows": lambda m, x, y: ((each(m, x, y) * (y > 0)).sum(1) / (1 + (y > 0).sum(1))).mean(),
    "a prototype for each class": lambda m, x, y: (
        each(m, x, y).mean() + (F.one_hot(y, CLASSES).double().flatten(0, 1).T @ m(x).flatten(0, 1)).square().sum()
    ),
    "spread over rows": lambda m, x, y: m(x).std(0).mean(),
    "spread over classes": lambda m, x, y: m(x).std(-1).mean() + m(x).amax(-1).mean() + m(x).logsumexp(-1).mean(),
    "pairs": lambda m, x, y: F.pdist(m(x).flatten(1)).mean(),
    "largest": lambda m, x, y: each(m, x, y).max(),
    "norm of rows": lambda m, x, y: m(x).flatten(1).norm(dim=1).mean(),
    "norm": lambda m, x, y: m(x).norm(),
    "flood": lambda m, x, y: (each(m, x, y).mean() - 1e-3).abs() + 1e-3,
    "divergence": lambda m, x, y: F.kl_div(m(x).log_softmax(-1), probabilities(m, x).detach(), reduction="batchmean"),
    "ctc": lambda m, x, y: F.ctc_loss(
        m(x).log_softmax(-1).transpose(0, 1),
        y[:, :1] * 0 + 1,
        torch.full((len(x),), y.shape[1]),
        torch.ones(len(x), dtype=torch.long),
    ),
    "slopes": lambda m, x, y: slopes(m, x.clone().requires_grad_()).square().sum((1, 2)).mean(),
    "of inputs with gradient": lambda m, x, y: m(x.clone().requires_grad_()).square().sum(),
}
UNSEEN = {
    "entropy of the mean": "a function of a mean over rows that is still a tensor",
    "every other row": "as many values in each part",
    "a prototype for each class": "a product of matrices that sums over rows",
    "spread over rows": "a statistic along rows that is still a tensor",
}
"""Wrong on several ranks, and the graph does not tell."""


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def gradient(form: Loss, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    m.zero_grad()
    form(m, x, y).backward()
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in m.parameters()])


def refused(form: Loss, m: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> str:
    """What the ranks are told together, if they have these rows."""
    mine, seen = [len(x) for x, _ in parts], []
    loop = Loop(Comm(0, 1))
    try:
        for x, y in parts:
            loop.losses = read([form(m, x, y)], 2, len(x))
            loop.batches.present = Any
            seen.append((loop.losses.kept, loop._counts()))
        loop._same_units([[float(n), -1.0 if kept is None else kept] for n, (kept, _) in zip(mine, seen, strict=True)])
        loop._same_counts([float(n) for n in mine], [counts for _, counts in seen])
    except UsageError as error:
        return str(error)
    return ""


def data(rows: int, steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(rows * 10 + steps)
    m = nn.Linear(5, CLASSES)
    return m, torch.randn(rows, steps, 5), torch.randint(0, CLASSES, (rows, steps))


def judged(form: str, rows: tuple[int, ...], steps: int) -> tuple[bool, str]:
    """Whether the mean over ranks is that of one process, and the refusal."""
    m, x, y = data(sum(rows), steps)
    parts = list(zip(x.split(rows), y.split(rows), strict=True))
    shares = [len(part) / len(x) * gradient(FORMS[form], m, part, t) for part, t in parts]
    gap = float((sum(shares) - gradient(FORMS[form], m, x, y)).abs().max())
    return gap <= 1e-9, refused(FORMS[form], m, parts)


@pytest.mark.parametrize("form", FORMS)
def test_refused_only_where_ranks_would_train_otherwise(form: str) -> None:
    """Also where classes, steps and rows are as many, and where a rank has one row."""
    for rows in ((4, 4), (3, 2), (2, 1), (6, 6, 5)):
        for steps in (2, 3, 4):
            if form not in ("pairs", "spread over rows") or min(rows) > 1:
                exact, said = judged(form, rows, steps)
                assert not (exact and said), f"rows {rows}, {steps} steps: {said}"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_wrong_is_refused_or_listed(form: str) -> None:
    exact, said = judged(form, (6, 6, 5), 3)
    assert (form in UNSEEN) == (not exact and not said), said


def test_a_reader_that_takes_sums_for_means_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Reader, "_exact", lambda *_: False)
    assert judged("mean and sum", (6, 6, 5), 3) == (False, "")


def test_a_reader_that_takes_means_for_sums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Reader, "_over_rows", lambda *_: False)
    exact, said = judged("sum over numbers", (6, 6, 5), 3)
    assert exact and said


def test_what_is_said_to_be_a_sum_or_a_mean_is_looked_at() -> None:
    m, x, y = data(6, 3)
    found = {form: over_rows(FORMS[form](m, x, y), 6) for form in ("sum", "cross entropy", "sum over rows")}
    assert found == {"sum": Kind.SUM, "cross entropy": Kind.MEAN, "sum over rows": Kind.HAND}


def test_long_sums_over_parameters_are_no_sums_over_rows() -> None:
    """Behind as many nodes as are looked at, nothing is refused."""
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(300))
    x = torch.randn(4, 3)
    loss = layers[0](x).square().mean() + sum(p.square().sum() + p.abs().sum() for p in layers.parameters())
    assert read([loss], 2, 4).counts == (12.0,)


def test_losses_of_batches_nobody_counted() -> None:
    m, x, _ = data(6, 3)
    with pytest.raises(UsageError, match="sum over rows"):
        read([m(x).sum()], 2, 0)
    for loss in (m(x).mean() + m(x).sum(), m(x).mean().sqrt(), m(x).norm()):
        read([loss], 2, 0)


def test_tensors_of_other_kinds_are_read() -> None:
    m, x, _ = data(6, 3)
    ragged = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)], layout=torch.jagged)
    wave = torch.complex(m(x), m(x))
    for loss in (
        m(ragged).sum(-1).values().mean() + m(ragged).values().square().sum() / 5,
        (wave * torch.tensor(2j)).abs().mean() + torch.view_as_real(wave.sum() * torch.tensor(1j)).mean(),
        torch.utils.checkpoint.checkpoint(lambda given: m(given).square().mean(), x, use_reentrant=False),
        torch.vmap(lambda row: m(row).square().sum())(x).mean(),
        torch.sparse.mm(torch.eye(6).to_sparse(), m(x)[:, 0]).mean(),
    ):
        assert read([loss], 2, 6).kept is None
