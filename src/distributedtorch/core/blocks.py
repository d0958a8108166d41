"""The repeated parts of a model: what is recomputed, or gathered, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules of one class repeated in a list: the layers of most networks; else the direct children."""
    found: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(container) > 1:
            kinds = Counter(type(child) for child in container)
            found += [child for child in container if kinds[type(child)] > 1 and any(True for _ in child.parameters())]
    outer = {id(m) for block in found for m in block.modules() if m is not block}
    return [block for block in found if id(block) not in outer] or [
        child for child in model.children() if any(True for _ in child.parameters())
    ]


def block_of_each(params: Sequence[Tensor], blocks: Sequence[nn.Module]) -> list[int]:
    """For every parameter the number of the first block it is in, or -1."""
    where = {id(p): number for number, block in reversed(list(enumerate(blocks))) for p in block.parameters()}
    return [where.get(id(param), -1) for param in params]
