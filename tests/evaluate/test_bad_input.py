"""What cannot be evaluated is refused, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from tests.evaluate.cases import LOADERS, Flow, data, network, torchmetrics

PLAIN = LOADERS["plain"](7)
META = [(torch.empty(4, 5, device="meta", dtype=torch.float64), torch.empty(4, device="meta", dtype=torch.long))]
IGNORED = DataLoader(TensorDataset(data(4).tensors[0], torch.full((4,), -100)), batch_size=2)
DICTS: Any = DataLoader([{"input": 1.0}], batch_size=1)  # type: ignore[arg-type]


def mean(output: Any, target: Any) -> Any:
    return (output.argmax(1) == target).double().mean()


class Doubled(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.cat([x, x])


class ByWord(nn.Module):
    def forward(self, input: Any) -> Any:
        return input


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: dt.evaluate(print, PLAIN), "an nn.Module"),  # type: ignore[arg-type]
    "no loader": (lambda: dt.evaluate(network(), 5), "can be iterated"),
    "no batches": (lambda: dt.evaluate(network(), []), "without batches"),
    "all dropped": (lambda: dt.accuracy(network(), LOADERS["drop_last"](2)), "without batches"),
    "samples, not batches": (lambda: dt.evaluate(network(), DataLoader(Flow(4), batch_size=None)), "batch_size=None"),
    "no metrics": (lambda: dt.evaluate(network(), PLAIN, {}), "an empty dict"),
    "a list of metrics": (lambda: dt.evaluate(network(), PLAIN, [mean]), "metrics= is a list"),
    "a number as metric": (lambda: dt.evaluate(network(), PLAIN, {"x": 3}), "'x' is a int"),
    "a number as name": (lambda: dt.evaluate(network(), PLAIN, {1: mean}), "the key 1"),
    "a mean over rows": (lambda: dt.evaluate(network(), PLAIN, {"x": mean}), 'reduction="none"'),
    "a value too few": (lambda: dt.evaluate(network(), PLAIN, {"x": lambda o, t: t[1:]}), "(2,) for 3 samples"),
    "no sample counts": (lambda: dt.accuracy(network(), IGNORED), "no samples on any rank"),
    "more outputs than targets": (lambda: dt.evaluate(Doubled(), PLAIN), "6 rows and a target of 3"),
    "three in a batch": (lambda: dt.evaluate(network(), [(1, 2, 3)]), "of 3 things"),
    "no labels": (lambda: dt.evaluate(ByWord(), DICTS), "labels"),
    "a step without target": (lambda: dt.evaluate(network(), PLAIN, step=lambda m, b: m(b[0])), "step gave a Tensor"),
    "another device": (lambda: dt.evaluate(network(), META), "the model is on cpu, the data on meta"),
    "nothing suggests itself": (lambda: dt.evaluate(network(), [(torch.zeros(2, 5).double(), ["a", "b"])]), "metrics="),
    "accuracy of numbers": (lambda: dt.accuracy(network(), PLAIN, step=lambda m, b: (b[0], b[0])), "class scores"),
    "one score for all": (lambda: dt.scores(network(), PLAIN, mean), "one entry per sample"),
    "a stream in folds": (lambda: dt.folds(Flow(9), 3), "without length"),
    "one fold": (lambda: dt.folds(data(9), 1), "from 2 to 9"),
    "more folds than samples": (lambda: dt.folds(data(9), 10), "k=10 folds of 9"),
    "half a fold": (lambda: dt.folds(data(9), 2.5), "whole number"),  # type: ignore[arg-type]
    "one score": (lambda: dt.compare([1.0], [2.0]), "two or more"),
    "scores without end": (lambda: dt.compare([1.0, float("nan")], [2.0, 1.0]), "not all finite"),
    "a table of scores": (lambda: dt.compare(torch.ones(2, 2), torch.ones(2, 2)), "one dimension"),
    "uneven pairs": (lambda: dt.compare([1.0, 2.0], [1.0, 2.0, 3.0]), "paired=False"),
}


def kept_words() -> Any:
    class Words(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("words", [])

        def update(self, output: Any, target: Any) -> None:
            self.words.append("word")

        def compute(self) -> Any:
            return torch.zeros(())

    return dt.evaluate(network(), PLAIN, {"words": Words()})


def drawn() -> Any:
    inner = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    return dt.evaluate(network(), PLAIN, {"x": torchmetrics.wrappers.BootStrapper(inner)})


def unreduced_lists() -> Any:
    metrics = {"x": torchmetrics.PearsonCorrCoef()}
    return dt.evaluate(network(), PLAIN, metrics, step=lambda m, b: (b[0].tolist(), b[1].tolist()))


def collection_inside() -> Any:
    return dt.evaluate(network(), PLAIN, {"x": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])})


if torchmetrics is not None:
    CASES |= {
        "states that are not tensors": (kept_words, "'words' that are not tensors"),
        "a metric that draws": (drawn, "draws at every update"),
        "states without reduction": (unreduced_lists, "states without reduction, and is given list and list"),
        "a collection inside": (collection_inside, "goes in as metrics= itself"),
    }


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_refused_in_words(name: str) -> None:
    call, words = CASES[name]
    with pytest.raises(dt.UsageError) as error:
        call()
    said = str(error.value)
    assert words in said and "needed:" in said and "do:" in said


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore")
def test_a_collection_is_taken() -> None:
    pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": 3}
    kinds = [torchmetrics.Accuracy(average="micro", **options), torchmetrics.Precision(average="macro", **options)]
    result = dt.evaluate(network(), PLAIN, torchmetrics.MetricCollection(kinds, prefix="val_"))
    assert result.keys() == {"val_MulticlassAccuracy", "val_MulticlassPrecision"}
    assert result["val_MulticlassAccuracy"] == pytest.approx(dt.accuracy(network(), PLAIN), abs=1e-6)


def test_a_metric_that_counts_beside_its_states() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counts(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        n = 0

        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.n += len(target)

        def compute(self) -> int:
            return self.n

    with pytest.raises(dt.UsageError, match=r"counts in 'n'[\s\S]*add_state"):
        dt.evaluate(network(), LOADERS["plain"](8), {"n": Counts()})
