"""The loss scale of float16: what backward starts from, and what becomes of it when gradients overflow.

Micikevicius et al., "Mixed Precision Training", ICLR 2018.

Backward starts from the scale instead of 1, so that small gradients do not vanish in float16; gradients are divided by
it before they are summed over ranks, so `p.grad`, clipping and norms never see it. Where any rank's gradient is not
finite, all ranks leave out that step and halve the scale; after many good steps in a row it doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm

_FIRST, _LEAST, _MOST = 2.0**16, 1.0, 2.0**24
_GOOD_STEPS_TO_GROW = 2000


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of gradients taken together, sparse ones included."""
    return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in grads])


class LossScale:
    """The scale, the same on all ranks."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.value = _FIRST
        self.good = 0
        """Steps in a row that were not left out."""
        self.skipped = 0
        """Steps left out so far."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.value, self.good, self.skipped = float(state["value"]), int(state["good"]), int(state["skipped"])

    def roots(self, tensors: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
        """What backward starts from, multiplied."""
        return [(torch.ones_like(t) if g is None else g) * self.value for t, g in zip(tensors, given, strict=True)]

    def finite(self, norm: Tensor) -> bool:
        """Whether the norm of all gradients is finite on all ranks; moves the scale. A group call."""
        bad = torch.tensor([float(not bool(torch.isfinite(norm)))])
        if self.comm.world > 1:
            bad = self.comm.exchange("finite", bad).amax(dim=0)
        if float(bad):
            self.value, self.good, self.skipped = max(self.value / 2, _LEAST), 0, self.skipped + 1
            return False
        self.good += 1
        if self.good == _GOOD_STEPS_TO_GROW:
            self.value, self.good = min(self.value * 2, _MOST), 0
        return True
