"""Options of an optimizer as a row of numbers: learning rates and the like, which may travel with a push.

Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016 (`rates=staleness`).

Only options that are numbers in the optimizer's defaults count, so that ranks have the same ones whatever schedulers
add to their groups. 8 bytes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributedtorch.serve.board import Refused


def numbers(optimizer: Optimizer) -> list[float]:
    """The options of every group in a row."""
    return [number for _, _, value in _options(optimizer) for number in _flat(value)]


def read(data: Tensor, optimizer: Optimizer) -> list[float]:
    """The numbers in some bytes, for an optimizer of this kind.

    Raises:
        Refused: Not as many as this one has, or not finite where this one's are.
    """
    mine = numbers(optimizer)
    if data.numel() != 8 * len(mine):
        raise Refused(f"{data.numel()} bytes of options, {8 * len(mine)} needed: of another optimizer?")
    found: list[float] = data.view(torch.float64).tolist()
    if not all(math.isfinite(one) or one == here for one, here in zip(found, mine, strict=True)):
        raise Refused("options (a learning rate?) that are NaN or infinite")
    return found


def put(optimizer: Optimizer, given: Sequence[float]) -> None:
    """Give an optimizer such options."""
    at = 0
    for number, name, value in list(_options(optimizer)):
        group, count = optimizer.param_groups[number], len(_flat(value))
        group[name] = _like(value, given[at : at + count])
        at += count


def plain(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of every group the options that its optimizer has by name and that can travel: numbers, words, yes and no."""
    return [
        {name: group[name] for name in optimizer.defaults if name in group and _is_plain(group[name])}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | Tensor | None)


def mean(given: Sequence[Sequence[float]]) -> list[float]:
    """Number by number."""
    return [sum(column) / len(given) for column in zip(*given, strict=True)]


def weights(optimizer: Optimizer, given: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each worker's options and each group, its learning rate over the mean of all."""
    middle = mean(given)
    found = [[1.0] * len(optimizer.param_groups) for _ in given]
    at = 0
    for number, name, value in _options(optimizer):
        if name == "lr" and middle[at]:
            for mine, options in zip(found, given, strict=True):
                mine[number] = options[at] / middle[at]
        at += len(_flat(value))
    return found


def divide(optimizer: Optimizer, late: int) -> None:
    """Learning rates for a push of that staleness."""
    for group in optimizer.param_groups:
        if late > 1 and "lr" in group:
            group["lr"] = group["lr"] / late


def _options(optimizer: Optimizer) -> Iterator[tuple[int, str, Any]]:
    """Group, name and value of every option that is a number, or some."""
    for number, group in enumerate(optimizer.param_groups):
        for name in optimizer.defaults:
            if name != "params" and _flat(group.get(name)):
                yield number, name, group[name]


def _flat(value: Any) -> list[float]:
    """The numbers in an option; none where it is something else."""
    if isinstance(value, list | tuple):
        each = [_flat(one) for one in value]
        return [one[0] for one in each] if all(len(one) == 1 for one in each) else []
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 else []
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _like(value: Any, given: Sequence[float]) -> Any:
    """Numbers in the form that an option has."""
    if isinstance(value, list | tuple):
        return type(value)(_like(one, [number]) for one, number in zip(value, given, strict=True))
    if isinstance(value, Tensor):
        return torch.full_like(value, given[0])
    return int(given[0]) if isinstance(value, int) and float(given[0]).is_integer() else given[0]
