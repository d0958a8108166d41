"""Rows of tables: means of sparse gradients, and which rows a worker does not have yet.

A server keeps for every row of a table the version at which it changed last: 8 bytes a row. A worker says which version
it has, and gets the rows that have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.serve.parcel import ABSENT, Item, Part, plain, rows, sparse

_BY_ROWS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.SparseAdam, torch.optim.Adagrad)
"""Change only the rows that the gradient has."""


class Changed:
    """At which version each row of a table changed last."""

    def __init__(self, count: int) -> None:
        self.at = torch.zeros(count, dtype=torch.int64)

    def mark(self, numbers: Tensor, version: int) -> None:
        """Rows have changed."""
        self.at[numbers] = version

    def since(self, item: Item, table: Tensor, held: int) -> Part:
        """What a worker with such a version needs: the rows changed since, or all where that is less."""
        numbers = (self.at > held).nonzero().view(-1)
        if item.bytes_row * len(numbers) >= item.bytes:
            return plain(table)
        return rows(sparse(numbers, table.detach()[numbers], item.shape)) if len(numbers) else ABSENT


def mean(grads: Sequence[tuple[Tensor, float]], count: int) -> Tensor:
    """The sum of sparse gradients, each with its weight, over a number of pushes."""
    numbers = torch.cat([grad.indices()[0] for grad, _ in grads])
    values = torch.cat([grad.values() * (weight / count) for grad, weight in grads])
    return sparse(numbers, values, grads[0][0].shape, ordered=False).coalesce()


def by_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer changes no other rows than those of the gradient."""
    plain_sgd = type(optimizer) is torch.optim.SGD and not group["momentum"]
    return plain_sgd or type(optimizer) in _BY_ROWS


def different(before: Tensor, after: Tensor) -> Tensor:
    """The rows in which two tables differ."""
    return (before != after).flatten(1).any(1).nonzero().view(-1)
