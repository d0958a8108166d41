"""distributedtorch: `dt.distribute(model, optimizer, plan=word)`, the words are plans; all else by default."""

from __future__ import annotations

from torch import nn

import distributedtorch as dt
from benchmarks.peers.loop import Step, adamw, plain


def build(word: str, model: nn.Module) -> Step:
    model, optimizer = dt.distribute(model, adamw(model), plan=word)
    return plain(model, optimizer)
