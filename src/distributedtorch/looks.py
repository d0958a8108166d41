"""How tensors of a checkpoint look beside those here, in a few lines for an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distributedtorch.checkpoint.index import Entry

_SHOWN = 5


def looks(value: Any) -> str:
    """A tensor's shape and type, of one here or of one that was saved."""
    if not isinstance(value, Tensor | Entry):
        return "something else than a tensor"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def difference(have: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    """How two states differ, in a few lines."""
    found = {
        "missing in the checkpoint": [name for name in have if name not in saved],
        "not here": [name for name in saved if name not in have],
        "of another shape or type": [
            f"{name} (saved {saved[name]}, here {have[name]})"
            for name in have
            if name in saved and saved[name] != have[name]
        ],
    }
    return [
        f"    {what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in found.items()
        if names
    ]
