"""What autograd recorded about the loss: refuses sums, counts the targets a mean is over.

Only what torch writes into the graph can be seen: the reduction of its own losses, ignored targets, class weights, a
bare `.sum()` at the root. A sum divided by something is taken for a mean made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributedtorch.core.errors import UsageError, explain

_MEAN, _SUM = 1, 2
_THROUGH = ("AddBackward", "MulBackward", "SubBackward", "ToCopyBackward", "NegBackward", "ViewBackward", "SqueezeBack")
_DEPTH = 6


def kept_units(roots: Sequence[Tensor], world: int) -> float | None:
    """Targets that count in torch's mean losses over classes; None where torch records none."""
    if world == 1:
        return None
    kept: list[float] = []
    for root in roots:
        if root.grad_fn is not None and root.numel() == 1:
            _inspect(root.grad_fn, kept, 0)
    return sum(kept) if kept else None


def _inspect(node: Any, kept: list[float], depth: int) -> None:
    name = node.name()
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM or (depth == 0 and name.startswith("SumBackward")):
        raise UsageError(
            explain(
                f"the loss is a sum ({name})",
                "a mean over samples: a sum would grow with the batch and shrink with the number of ranks",
                "reduction='mean', or divide by the rows at hand, or loss = dt.weight(loss / n, n)",
            )
        )
    if reduction == _MEAN and name.startswith("NllLoss"):
        kept.append(_nll_units(node))
    if depth < _DEPTH and name.startswith(_THROUGH):
        for parent, _ in node.next_functions:
            if parent is not None:
                _inspect(parent, kept, depth + 1)


def _nll_units(node: Any) -> float:
    total: Tensor = node._saved_total_weight
    return float(total)
