"""Autograd's graph, read from outside: what a node is, where it came from, which shapes it saw.

Names, shapes and saved constants as torch records them; `Node._input_metadata` and the `_saved_` attributes of nodes
have no other names. Where a node does not record what is asked for, None.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

Link = tuple[Any, int]
"""A node of the graph, and which of its results."""

VIEW = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute", "Transpose"}
"""Operations that show the same numbers in another shape."""
_VIEWS = 8


def stem_of(node: Any) -> str:
    """The name of the operation; empty for a leaf."""
    name: str = node.name()
    return "" if name.endswith("AccumulateGrad") else name.partition("Backward")[0]


def parents_of(node: Any) -> list[Link]:
    return [link for link in node.next_functions if link[0] is not None]


def shape_of(link: Link) -> tuple[int, ...]:
    node, number = link
    if stem_of(node) == "":
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[number].shape)


def sizes_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what was reduced; None where a tensor of another kind does not record it."""
    given = getattr(node, "_saved_self_sym_sizes", None)
    return None if given is None else tuple(given)


def pieces_of(link: Link) -> list[Link] | None:
    """The numbers a tensor is put together from, where it is."""
    node, _ = link
    if stem_of(node) not in ("Stack", "Cat"):
        return None
    parents = parents_of(node)
    return parents if all(math.prod(shape_of(parent)) == 1 for parent in parents) else None


def shapes_of(link: Link) -> list[tuple[int, ...]]:
    """The shapes a tensor had before it was only viewed otherwise."""
    found = [shape_of(link)]
    while stem_of(link[0]) in VIEW and len(found) < _VIEWS:
        link = parents_of(link[0])[0]
        found.append(shape_of(link))
    return found


def dims_of(node: Any, number: int) -> tuple[int, ...] | None:
    """The dimensions an operation has named; None: none, so all."""
    given = getattr(node, "_saved_dim", None)
    named = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    return tuple((dim - 2**64 if dim >= 2**63 else dim) % max(number, 1) for dim in named) or None


def constant_of(node: Any) -> float | None:
    """The number a value is multiplied or divided by, where it has no gradient."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.detach())
    return None


def constants_of(node: Any) -> Tensor | None:
    """The tensor without gradient a value is multiplied or divided by."""
    names = ("_saved_other", "_saved_tensor", "_saved_mat2", "_saved_vec", "_saved_self")
    return next((value for name in names if isinstance(value := getattr(node, name, None), Tensor)), None)
