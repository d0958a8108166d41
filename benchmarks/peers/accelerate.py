"""Accelerate: `Accelerator(cpu=True)`, which is DDP over gloo here, with the DDP option that torch DDP has too."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from benchmarks.peers.loop import Step, adamw, plain


def build(word: str, model: nn.Module) -> Step:
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model, optimizer = accelerator.prepare(model, adamw(model))
    return plain(model, optimizer, accelerator.backward)
