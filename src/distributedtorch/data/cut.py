"""Rows cut out of a finished batch: any nesting of tensors in lists, tuples, dicts, dataclasses and dict-like objects.

For loaders that only hand out whole batches. Every tensor (or numpy array) of a batch must have the same leading
dimension, which is taken as the rows, or the same length in the dimension that was said (`batch_dim`); numbers, strings
and 0-dim tensors pass unchanged, and a list or tuple without tensors is cut when its length is the number of rows. A
list of tensors is read as several fields of one batch, the way torch's collation makes it, never as a list of samples:
samples of one shape in a list cannot be told from fields.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.data.partition import Part, stand_in


def divide_batch(batch: Any, part: Part, number: int = 0) -> tuple[float, int, Any]:
    """Real rows of this rank, rows of the global batch, and this rank's part of `batch`, the run's `number`-th."""
    if part.whole:
        total = next((array.shape[dim] for array, dim in with_dims(batch, part.dims)), 1)
        return part.share(total), total, batch
    total = leading(batch, part.dims)
    if total == 0:
        return 0, 0, batch
    mine = part.rows(total, number)
    span = stand_in(mine)
    dims = iter([dim for _, dim in with_dims(batch, part.dims)])

    def take(array: Any) -> Any:
        return _slice(array, span, total, part.reverse, next(dims) if _is_array(array) else 0)

    if _is_fields(batch):
        parts = [take(field) for field in batch]
        piece = type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    else:
        piece = cut(batch, total, take)
    return part.share(len(mine)), total, piece


def leading(batch: Any, dims: int | tuple[int, ...] = 0) -> int:
    """The rows of a batch: the leading dimension its tensors share, or the one that has them."""
    found = {array.shape[dim] for array, dim in with_dims(batch, dims)}
    if not found and isinstance(batch, list):
        return len(batch)
    if _is_fields(batch):
        return len(batch[0])
    if len(found) == 1:
        return found.pop()
    shapes = ", ".join(str(tuple(array.shape)) for array in arrays(batch))
    seen = f"tensors of shapes {shapes}" if found else f"a {type(batch).__name__} without tensors"
    raise UsageError(
        explain(
            f"a batch with {seen} cannot be divided into rows",
            "tensors that all have the rows of the batch as leading dimension",
            "pass a torch DataLoader with a batch_size (it is divided before batches are built), "
            "or yield batches whose tensors agree in their leading dimension; where the rows are in another one: "
            "dt.distribute(..., batch_dim=1), or batch_dim=(0, 1) for a batch of two tensors",
        )
    )


def _is_fields(batch: Any) -> bool:
    """Whether a batch without tensors is a tuple of fields, each a list with one entry per row."""
    if not isinstance(batch, tuple) or not batch or next(arrays(batch), None) is not None:
        return False
    return all(isinstance(field, list | tuple) for field in batch) and len({len(field) for field in batch}) == 1


def with_dims(batch: Any, dims: int | tuple[int, ...]) -> list[tuple[Any, int]]:
    """Every tensor or array of a batch, with the dimension of it that has the rows."""
    found = list(arrays(batch))
    if isinstance(dims, int):
        return [(array, dims if array.ndim > dims else 0) for array in found]
    if len(dims) != len(found) or any(array.ndim <= dim for array, dim in zip(found, dims, strict=False)):
        shapes = ", ".join(str(tuple(array.shape)) for array in found)
        given = f"batch_dim={dims}, and a batch of {len(found)} tensors of shapes {shapes}"
        raise UsageError(
            explain(given, "the dimension of each tensor that has the rows", "give one for each, in order")
        )
    return list(zip(found, dims, strict=True))


def rows_first(batch: Any, dims: int | tuple[int, ...]) -> Any:
    """The batch, or where its rows are in another dimension its tensors with that one first."""
    return batch if dims == 0 else [_first(array, dim) for array, dim in with_dims(batch, dims)]


def _first(array: Any, dim: int, *, back: bool = False) -> Any:
    """Dimension `dim` put first, or put back."""
    before, after = (0, dim) if back else (dim, 0)
    order = [other for other in range(array.ndim) if other != before]
    order.insert(after, before)
    return array.permute(order) if isinstance(array, torch.Tensor) else array.transpose(order)


def arrays(batch: Any) -> Iterator[Any]:
    """Every tensor or array of at least one dimension in a batch, in order."""
    if _is_array(batch):
        if batch.ndim > 0:
            yield batch
        return
    for _, child in _children(batch):
        yield from arrays(child)


def cut(batch: Any, total: int, take: Callable[[Any], Any]) -> Any:
    """A copy of `batch` with `take` applied to everything that has `total` rows."""
    if _is_array(batch):
        return take(batch) if batch.ndim > 0 else batch
    if isinstance(batch, list | tuple):
        return _cut_sequence(batch, total, take)
    children = list(_children(batch))
    if not children:
        return batch
    piece = copy.copy(batch)
    for key, child in children:
        if hasattr(batch, "items"):
            piece[key] = cut(child, total, take)
        else:
            object.__setattr__(piece, key, cut(child, total, take))
    return piece


def _cut_sequence(batch: list[Any] | tuple[Any, ...], total: int, take: Callable[[Any], Any]) -> Any:
    if next(arrays(batch), None) is None:
        return take(batch) if len(batch) == total and type(batch) in (list, tuple) else batch
    parts = [cut(child, total, take) for child in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _children(batch: Any) -> Iterator[tuple[Any, Any]]:
    """The named or numbered members of a container; none for anything else."""
    if isinstance(batch, list | tuple):
        yield from enumerate(batch)
    elif callable(getattr(batch, "items", None)) and hasattr(batch, "__setitem__"):
        yield from batch.items()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield field.name, getattr(batch, field.name)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "ndim"))


def _slice(array: Any, span: range, total: int, reverse: bool, dim: int) -> Any:
    """Rows `span` of `array`, or of `array` reversed."""
    if isinstance(array, torch.Tensor) and array.layout != torch.strided:
        numbers = [total - 1 - row for row in span] if reverse else list(span)
        piece = array.to_sparse_coo().index_select(dim, torch.tensor(numbers, device=array.device))
        return piece.to_sparse(layout=array.layout)
    if dim:
        piece = _first(_slice(_first(array, dim), span, total, reverse, 0), dim, back=True)
        return piece.contiguous() if isinstance(piece, torch.Tensor) else piece.copy()
    if not reverse:
        return array[span.start : span.stop]
    piece = array[total - span.stop : total - span.start]
    return piece.flip(0) if isinstance(piece, torch.Tensor) else piece[::-1]
