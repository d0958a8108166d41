"""Which figures an evaluation reports: those asked for, or what the outputs and targets suggest."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.score import replay
from distributedtorch.score.figure import Figure, Mean, checked
from distributedtorch.score.replay import Replay
from distributedtorch.score.states import States, is_metric

IGNORED = -100
"""Targets that do not count, as in torch's cross entropy."""


def figures(metrics: Any) -> dict[str, Figure]:
    """The figures for `metrics=`: a dict of names, or a torchmetrics.MetricCollection."""
    if is_metric(metrics, "MetricCollection"):
        metrics = dict(metrics.items())
    if not isinstance(metrics, dict) or not metrics:
        seen = "an empty dict" if metrics == {} else f"a {type(metrics).__name__}"
        raise UsageError(
            explain(f"metrics= is {seen}", "a dict from names to metrics", 'write metrics={"name": metric}')
        )
    return {name: _figure(name, metric) for name, metric in metrics.items()}


def suggested(output: Any, target: Any) -> dict[str, Figure]:
    """Loss and accuracy for classes, the squared error for numbers."""
    if _classes(output, target):
        return {"loss": Mean("loss", cross_entropy), **top_1(output, target)}
    if _tensors(output, target) and output.shape == target.shape and target.is_floating_point():
        return {"loss": Mean("loss", squared_error)}
    raise UsageError(
        explain(
            f"no metrics were given, and none suggests itself for {_form(output)} and {_form(target)}",
            "class scores (n, classes) and class numbers (n), or two tensors of one shape",
            "pass metrics=, or step= that returns such an output and target",
        )
    )


def top_1(output: Any, target: Any) -> dict[str, Figure]:
    """Accuracy, where the output is class scores."""
    if not _classes(output, target):
        raise UsageError(
            explain(
                f"the accuracy of {_form(output)} and {_form(target)}",
                "class scores (n, classes) and class numbers (n)",
                "pass step= that returns such an output and target",
            )
        )
    return {"accuracy": Mean("accuracy", right)}


def right(output: Tensor, target: Tensor) -> Tensor:
    """Whether the highest class score is the target's, for each target that counts."""
    scores, classes = _rows(output, target)
    return scores.argmax(dim=1) == classes


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of each target that counts."""
    return functional.cross_entropy(*_rows(output, target), reduction="none")


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample."""
    return (output - target).square().flatten(start_dim=1).mean(dim=1) if output.ndim > 1 else (output - target) ** 2


def _figure(name: Any, metric: Any) -> Figure:
    if not isinstance(name, str):
        raise UsageError(explain(f"metrics= has the key {name!r}", "names", 'write metrics={"name": metric}'))
    if is_metric(metric):
        return Replay(name, metric) if replay.needed(metric) else States(name, metric)
    if callable(metric) and not is_metric(metric, "MetricCollection"):
        return Mean(name, checked(name, metric))
    raise UsageError(
        explain(
            f"metric {name!r} is a {type(metric).__name__}",
            "a torchmetrics.Metric, or a function (output, target) -> one value per sample",
            "pass one of these; a MetricCollection goes in as metrics= itself",
        )
    )


def _rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Class scores (rows, classes) and class numbers (rows) of all targets that count."""
    scores, classes = output.movedim(1, -1).flatten(end_dim=-2), target.flatten()
    counted = classes != IGNORED
    return scores[counted], classes[counted]


def _classes(output: Any, target: Any) -> bool:
    if not _tensors(output, target) or target.is_floating_point() or not output.is_floating_point():
        return False
    return output.ndim == target.ndim + 1 and (len(output), *output.shape[2:]) == tuple(target.shape)


def _tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) and value.ndim > 0 for value in values)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).split('.')[1]} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
