"""Taking the chance out of a model: every dropout set to 0, and each named, so that runs can be compared."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_ATTRIBUTES = ("dropout", "dropout_p")
"""Where modules that drop without a submodule keep the probability (nn.MultiheadAttention, nn.LSTM, and many users)."""


def still(model: nn.Module) -> list[str]:
    """Set every dropout of `model` to 0; returns what was changed: `encoder.drop (0.1)`."""
    changed: list[str] = []
    for name, module in model.named_modules():
        for attribute in ("p",) if isinstance(module, _DropoutNd) else _ATTRIBUTES:
            chance = getattr(module, attribute, None)
            if isinstance(chance, float) and chance > 0:
                setattr(module, attribute, 0.0)
                shown = name if attribute == "p" else f"{name}.{attribute}".lstrip(".")
                changed.append(f"{shown or type(module).__name__} ({chance:g})")
    return changed
