"""Evaluations with the truth of each: a plain loop in one process, written without the library."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import distributedtorch as dt

torchmetrics: Any = None
with contextlib.suppress(ImportError):
    import torchmetrics

BATCH, CLASSES, WIDTH = 3, 3, 5
LENGTHS = range(1, 2 * BATCH + 2)
SOME = (1, BATCH - 1, BATCH + 1, 2 * BATCH + 1)
"""Fewer samples than ranks, fewer than a batch, and last batches of one row."""
REFUSED = {"refused": 1.0}
Outcome = tuple[Any, Any]
"""The truth and what was found."""


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)[:length]
    return TensorDataset(x, torch.randint(0, CLASSES, (64,), generator=generator)[:length])


def network() -> nn.Sequential:
    """A model that shows whether it was put into eval mode: dropout and BatchNorm, one part frozen."""
    torch.manual_seed(3)
    parts = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)]
    model = nn.Sequential(*parts).double()
    parts[1].running_mean.normal_()  # type: ignore[union-attr,operator]
    parts[1].eval()
    return model


class ByHand(Sampler[int]):
    """An order from Python's random state, with a sample that comes twice."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length + 1

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.length), 0]
        random.shuffle(order)
        return iter(order)


class Uneven:
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size + 1


class Flow(IterableDataset[Any]):
    """A stream without length."""

    def __init__(self, length: int) -> None:
        self.samples = data(length)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))


def batches_with_an_empty_last(length: int) -> list[Any]:
    x, y = data(length).tensors
    return [*zip(x.split(BATCH), y.split(BATCH), strict=True), (x[:0], y[:0])]


LOADERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda n: DataLoader(data(n), batch_size=BATCH),
    "shuffled": lambda n: DataLoader(data(n), batch_size=BATCH, shuffle=True),
    "drop_last": lambda n: DataLoader(data(n), batch_size=BATCH, shuffle=True, drop_last=True),
    "sampler": lambda n: DataLoader(data(n), batch_size=BATCH, sampler=ByHand(n)),
    "batch_sampler": lambda n: DataLoader(data(n), batch_sampler=Uneven(n)),
    "stream": lambda n: DataLoader(Flow(n), batch_size=BATCH),
    "empty_last": batches_with_an_empty_last,
    "generator": lambda n: (batch for batch in batches_with_an_empty_last(n)),
}


def right(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none")


def shares(output: Tensor, target: Tensor) -> Tensor:
    """Three values per sample."""
    return output.softmax(1)


def classified(sync: bool) -> dict[str, Any]:
    """Metrics of class scores; `sync`: as a user makes them, else without torchmetrics' own exchange."""
    metrics: dict[str, Any] = {"right": right, "entropy": entropy, "shares": shares}
    if torchmetrics is not None:
        options = {"task": "multiclass", "num_classes": CLASSES, "sync_on_compute": sync}
        metrics |= {
            "Accuracy": torchmetrics.Accuracy(**options),
            "F1": torchmetrics.F1Score(average="macro", **options),
            "AUROC": torchmetrics.AUROC(**options),
            "AUROC binned": torchmetrics.AUROC(thresholds=10, **options),
            "confusion": torchmetrics.ConfusionMatrix(**options),
        }
    return metrics


def few(sync: bool) -> dict[str, Any]:
    """One metric of each kind."""
    return {name: metric for name, metric in classified(sync).items() if name in ("entropy", "AUROC")}


def measured(sync: bool) -> dict[str, Any]:
    """Metrics of numbers: `as_numbers` is their step."""
    metrics: dict[str, Any] = {"error": lambda output, target: (output - target).abs()}
    if torchmetrics is not None:
        mse, mae, pearson, last = (
            kind(sync_on_compute=sync).set_dtype(torch.float64)
            for kind in (
                torchmetrics.MeanSquaredError,
                torchmetrics.MeanAbsoluteError,
                torchmetrics.PearsonCorrCoef,
                own_metrics()["Last"],
            )
        )
        largest = own_metrics()["Running mean"](sync_on_compute=sync).set_dtype(torch.float64)
        metrics |= {"MSE": mse, "sum": mse.clone() + mae, "Pearson": pearson, "last": last, "mean": largest}
    return metrics


def own_metrics() -> dict[str, Any]:
    """Metrics as a user writes them."""

    class Last(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        """The largest output of the last batch: no reduction named, and it depends on the order of updates."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.add_state("value", torch.zeros(()))

        def update(self, output: Tensor, target: Tensor) -> None:
            self.value = output.amax()

        def compute(self) -> Tensor:
            return self.value

    class RunningMean(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        """A mean over samples, kept as a mean; the lowest and the highest beside it."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")
            self.add_state("low", torch.tensor(float("inf")), dist_reduce_fx="min")
            self.add_state("high", torch.tensor(float("-inf")), dist_reduce_fx=lambda values: values.amax(0))
            self.seen = 0

        def update(self, output: Tensor, target: Tensor) -> None:
            self.seen += len(output)
            self.value = self.value + (output.sum() - self.value * len(output)) / self.seen
            self.low, self.high = self.low.minimum(output.amin()), self.high.maximum(output.amax())

        def compute(self) -> Tensor:
            return torch.stack([self.value, self.low, self.high])

    return {"Last": Last, "Running mean": RunningMean}


def as_numbers(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0])[:, 0], batch[1].double()


def as_classes(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def truth(model: nn.Module, loader: Any, metrics: dict[str, Any], step: Any = as_classes) -> dict[str, Any]:
    """What one process finds: every batch as it comes."""
    model, kept, seen = copy.deepcopy(model).eval(), [], 0
    with torch.no_grad():
        for batch in loader:
            if len(batch[1]):
                kept.append(step(model, batch))
                seen += 1
    return {name: _figure(metric, kept) for name, metric in metrics.items()} if seen else REFUSED


def _figure(metric: Any, kept: list[tuple[Tensor, Tensor]]) -> Any:
    if torchmetrics is None or not isinstance(metric, torchmetrics.Metric):
        return torch.cat([metric(output, target) for output, target in kept]).double().mean(0)
    for output, target in kept:
        metric.update(output, target)
    return metric.compute()


def found(*args: Any, **options: Any) -> Any:
    """What the library finds; a loader without batches is refused."""
    try:
        return dt.evaluate(*args, **options)
    except dt.UsageError as error:
        return REFUSED if "without batches" in str(error) else {"error": str(error)}


def seed(number: int = 11) -> None:
    torch.manual_seed(number)
    random.seed(number)


def classes(kind: str, length: int) -> Outcome:
    model, metrics = network(), classified if kind == "plain" else few
    seed()
    expected = truth(model, LOADERS[kind](length), metrics(sync=False))
    seed()
    return expected, found(model, LOADERS[kind](length), metrics(sync=True))


def numbers(kind: str, length: int) -> Outcome:
    model = network()
    seed()
    expected = truth(model, LOADERS[kind](length), measured(sync=False), as_numbers)
    seed()
    return expected, found(model, LOADERS[kind](length), measured(sync=True), step=as_numbers)


def defaults(length: int) -> Outcome:
    model, loader = network(), LOADERS["plain"](length)
    expected = truth(model, loader, {"loss": entropy, "accuracy": right})
    return {**expected, "alone": expected["accuracy"]}, {
        **dt.evaluate(model, loader),
        "alone": dt.accuracy(model, loader),
    }


def ignored_targets() -> Outcome:
    """As torch's cross entropy: a mean over the targets that count, unevenly spread over ranks."""
    x, y = data(9).tensors
    y = torch.where(torch.arange(9) < 3, torch.tensor(-100), y)
    output = network().eval()(x).detach()
    kept = y != -100
    expected = {"loss": functional.cross_entropy(output, y), "accuracy": (output.argmax(1) == y)[kept].double().mean()}
    return expected, dt.evaluate(network(), DataLoader(TensorDataset(x, y), batch_size=5))


def every_score(kind: str, length: int) -> Outcome:
    """In the order of one process."""
    model = network()
    seed()
    with torch.no_grad():
        expected = torch.cat([entropy(copy.deepcopy(model).eval()(x), y) for x, y in LOADERS[kind](length)])
    seed()
    return {"scores": expected}, {"scores": dt.scores(model, LOADERS[kind](length), entropy)}


class Labelled(nn.Module):
    """Called as Hugging Face models are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, values: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=None, logits=self.inner(values))


def dicts() -> Outcome:
    x, y = data(9).tensors
    rows = [{"values": a, "labels": b} for a, b in zip(x, y, strict=True)]
    expected = truth(network(), LOADERS["plain"](9), {"loss": entropy, "accuracy": right})
    return expected, dt.evaluate(Labelled(), DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]


def modes_come_back() -> Outcome:
    model = network()
    before = [module.training for module in model.modules()]
    metrics = classified(sync=True)
    dt.evaluate(model, LOADERS["plain"](6), metrics)
    with contextlib.suppress(ZeroDivisionError):
        dt.evaluate(model, LOADERS["plain"](6), step=lambda model, batch: 1 / 0)  # type: ignore[arg-type]
    touched = [name for name, metric in metrics.items() if getattr(metric, "update_called", False)]
    after = [module.training for module in model.modules()]
    assert any(before) and not all(before)
    return {"modes": torch.tensor(before), "touched": 0.0}, {
        "modes": torch.tensor(after),
        "touched": float(len(touched)),
    }


def workers() -> Outcome:
    loader = partial(DataLoader, data(9), batch_size=BATCH, num_workers=1)
    metrics = {"entropy": entropy}
    return truth(network(), loader(), metrics), found(network(), loader(), metrics)


def own_training(plan: str, *, evaluating: bool) -> Outcome:
    """Two epochs with an evaluation over the training loader in the middle: its result, and nothing has moved."""
    seed()
    model, generator = network(), torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(10), batch_size=BATCH, shuffle=True)
    other = DataLoader(data(7), batch_size=BATCH, shuffle=True, generator=generator)
    model, optimizer, loader = dt.distribute(model, optimizer, loader, plan=plan)
    seen, outcome = [], ({}, {})
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            seen.append(dt.total(x.sum()))
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluating and number == 1:
                outcome = _evaluated(model, loader, other)
    moved = {"order": torch.stack(seen), "generator": generator.get_state().sum(), **model.state_dict()}
    return outcome, {name: value.detach().clone() for name, value in moved.items()}


def _evaluated(model: nn.Module, loader: Any, other: Any) -> Outcome:
    with torch.random.fork_rng():
        full = network()
    full.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()})
    cursor = loader.cursor.state_dict() if hasattr(loader, "cursor") else {}
    results = {**dt.evaluate(model, loader), "other": dt.accuracy(model, other)}
    assert cursor == (loader.cursor.state_dict() if hasattr(loader, "cursor") else {})
    # Lists of batches, because a DataLoader would move the order that must be seen not to move.
    expected = truth(full, LOADERS["empty_last"](10), {"loss": entropy, "accuracy": right})
    return {**expected, "other": truth(full, LOADERS["empty_last"](7), {"right": right})["right"]}, results


def in_training(plan: str) -> Outcome:
    from distributedtorch.distribute import release

    (expected, results), moved = own_training(plan, evaluating=True)
    release()
    _, still = own_training(plan, evaluating=False)
    release()
    return {**expected, **still}, {**results, **moved}


CASES: dict[str, Callable[[], Outcome]] = {
    **{f"classes plain {n}": partial(classes, "plain", n) for n in LENGTHS},
    **{f"classes {kind} {n}": partial(classes, kind, n) for kind in LOADERS for n in SOME},
    **{f"numbers {kind} {n}": partial(numbers, kind, n) for kind in ("plain", "sampler") for n in LENGTHS},
    **{f"defaults {n}": partial(defaults, n) for n in LENGTHS},
    **{f"every score {kind} {n}": partial(every_score, kind, n) for kind in ("shuffled", "stream") for n in SOME},
    **{f"in training {plan}": partial(in_training, plan) for plan in ("ddp", "zero3")},
    "ignored targets": ignored_targets,
    "dicts": dicts,
    "modes": modes_come_back,
    "workers": workers,
}


def names(world: int) -> list[str]:
    """Those for one number of ranks: making an optimizer takes seconds (torch._dynamo), so training is at two only."""
    return [name for name in CASES if world <= 2 or not name.startswith("in training")]


def difference(expected: Any, result: Any) -> float:
    """The largest difference, relative to the size of the truth; infinite where the forms differ."""
    if isinstance(expected, dict):
        if not isinstance(result, dict) or expected.keys() != result.keys():
            return float("inf")
        return max((difference(expected[name], result[name]) for name in expected), default=0.0)
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (expected, result))
    if a.shape != b.shape:
        return float("inf")
    gap = torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs())
    return float((gap / a.abs().nan_to_num(1.0).clamp(min=1.0)).nan_to_num(float("inf")).amax()) if a.numel() else 0.0
