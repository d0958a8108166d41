"""Lightning Fabric: its DDP strategy over gloo, with the DDP option that torch DDP has too.

Its strategy for `fully_shard` asks for a GPU.
"""

from __future__ import annotations

import os

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from benchmarks.peers.loop import Step, adamw, plain


def build(word: str, model: nn.Module) -> Step:
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, adamw(model))
    return plain(model, optimizer, fabric.backward)
