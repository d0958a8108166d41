"""What each server has of what one optimizer trains, and how it travels: the same on workers and servers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Trained
from distributedtorch.core.wire import Wire
from distributedtorch.serve.parcel import Item
from distributedtorch.serve.terms import Terms
from distributedtorch.sync.sparse import tables
from distributedtorch.wire.feedback import Coded


def refuse_compensated(names: Sequence[str], items: Sequence[Item], terms: Terms) -> None:
    """Refuse to make up for delays where gradients are sparse."""
    found = [name for name, item in zip(names, items, strict=True) if item.table]
    if terms.compensate and found:
        given = f"compensate={terms.compensate:g} with a table of sparse gradients ({found[0]!r})"
        do = "leave compensate out, or give the table sparse=False"
        raise UsageError(explain(given, "dense gradients: a delay is made up for in all rows", do))


def items_of(trained: Trained, wire: Wire) -> list[Item]:
    """How each parameter travels."""
    sparse, code = tables(trained.models), wire.code if isinstance(wire, Coded) else None
    return [Item(param, table=id(param) in sparse, code=code) for param in trained.params]


def divided(params: Sequence[nn.Parameter], servers: int) -> list[list[int]]:
    """Numbers of parameters for each server: the largest first, to the one that has least."""
    parts: list[list[int]] = [[] for _ in range(min(servers, max(1, len(params))))]
    loads = [0] * len(parts)
    for index in sorted(range(len(params)), key=lambda k: (-params[k].numel(), k)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += params[index].numel() * params[index].element_size()
    return [sorted(part) for part in parts]
