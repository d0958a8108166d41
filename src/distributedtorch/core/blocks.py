"""The repeated parts of a model: what is recomputed, or gathered, one at a time."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from distributedtorch.core.errors import PlanError, explain


def blocks_in(models: Sequence[nn.Module], named: str | None) -> list[nn.Module]:
    """The blocks of all models: the outermost modules of the class `named`, or those that `blocks_of` finds."""
    if named is None:
        return [block for model in models for block in blocks_of(model)]
    modules = {id(module): module for model in models for module in model.modules()}
    found = [module for module in modules.values() if type(module).__name__ == named]
    inner = {id(m) for block in found for m in block.modules() if m is not block}
    return [block for block in found if id(block) not in inner]


def check_named(models: Sequence[nn.Module], named: str | None) -> None:
    """Refuse the name of a class that no module has."""
    modules = [module for model in models for module in model.modules()]
    if named is not None and not any(type(module).__name__ == named for module in modules):
        kinds = sorted({type(m).__name__ for m in modules if any(True for _ in m.parameters())})
        near = difflib.get_close_matches(named, kinds, n=1)
        do = f"write `block={near[0]}`" if near else "name one of these, or leave `block=` out"
        raise PlanError(explain(f"`block={named}`, but no module has that class", f"one of {', '.join(kinds)}", do))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules of one class repeated in a list: the layers of most networks; else the direct children."""
    found: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(container) > 1:
            children = [child for child in container if child is not None]
            kinds = Counter(type(child) for child in children)
            found += [child for child in children if kinds[type(child)] > 1 and any(True for _ in child.parameters())]
    outer = {id(m) for block in found for m in block.modules() if m is not block}
    return [block for block in found if id(block) not in outer] or [
        child for child in model.children() if any(True for _ in child.parameters())
    ]


def block_of_each(params: Sequence[Tensor], blocks: Sequence[nn.Module]) -> list[int]:
    """For every parameter the number of the first block it is in, or -1."""
    where = {id(p): number for number, block in reversed(list(enumerate(blocks))) for p in block.parameters()}
    return [where.get(id(param), -1) for param in params]


def small_ones_together(where: Sequence[int], params: Sequence[Tensor], limit: int) -> list[int]:
    """The same, with blocks that follow each other taken for one while they have at most `limit` bytes together."""
    sizes: dict[int, int] = {}
    for number, param in zip(where, params, strict=True):
        sizes[number] = sizes.get(number, 0) + param.numel() * param.element_size()
    stands, first, held = {-1: -1}, -1, limit + 1
    for number in sorted(sizes.keys() - {-1}):
        held += sizes[number]
        if held > limit:
            first, held = number, sizes[number]
        stands[number] = first
    return [stands[number] for number in where]
