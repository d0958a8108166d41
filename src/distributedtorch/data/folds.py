"""k-fold cross-validation: a dataset split k times into training and validation parts, alike on all ranks.

The split is drawn from a generator of its own, so nothing travels and no other random state moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.data.partition import rows


def folds(dataset: Dataset[Any], k: int, seed: int = 0) -> Iterator[tuple[Subset[Any], Subset[Any]]]:
    """Split a dataset for k-fold cross-validation, the same way on all ranks.

    Every sample is in exactly one validation part; their sizes differ by at most one.

        results = []
        for number, (train, validation) in enumerate(dt.folds(data, k=5)):
            torch.manual_seed(number)  # so that every fold is as in one process
            model, optimizer = build()
            loader = DataLoader(train, batch_size=32, shuffle=True)
            model, optimizer, loader = dt.distribute(model, optimizer, loader)
            fit(model, optimizer, loader)
            results.append(dt.accuracy(model, DataLoader(validation, batch_size=256)))

    Args:
        dataset: A map-style dataset.
        k: How many folds, from 2 to the number of samples.
        seed: Another seed, another split.

    Returns:
        An iterator over k pairs `(train, validation)` of `torch.utils.data.Subset`, each in the dataset's order.

    Raises:
        UsageError: The dataset has no length or too few samples, or k is not a whole number of at least 2.
    """
    try:
        total = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        given = f"a dataset without length ({type(dataset).__name__})"
        raise UsageError(explain(given, "a map-style dataset", "read the stream into a list")) from None
    if not isinstance(k, int) or isinstance(k, bool) or not 2 <= k <= total:
        do = "change k" if total > 1 else "give more samples"
        raise UsageError(explain(f"k={k!r} folds of {total} samples", f"a whole number from 2 to {total}", do))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    return (_fold(dataset, order, rows(total, k, fold)) for fold in range(k))


def _fold(dataset: Dataset[Any], order: list[int], held_out: range) -> tuple[Subset[Any], Subset[Any]]:
    train = sorted(order[: held_out.start] + order[held_out.stop :])
    return Subset(dataset, train), Subset(dataset, sorted(order[held_out.start : held_out.stop]))
