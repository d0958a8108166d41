"""No exchange: every rank trains a model of its own, on its own rows. The ideal that exchange adds to."""

from __future__ import annotations

from torch import nn

from benchmarks.peers.loop import Step, adamw, plain


def build(word: str, model: nn.Module) -> Step:
    return plain(model, adamw(model))
