"""torch's own, over gloo.

- "ddp": `DistributedDataParallel(gradient_as_bucket_view=True)`, the faster of its two modes.
- "zero": the same with `ZeroRedundancyOptimizer` around AdamW.
- "shard": `fully_shard` on every block and on the model; parameters are freed after forward and fetched again.
- "shard, kept": the same with `reshard_after_forward=False`: parameters stay from forward to backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import LEARNING_RATE, Step, adamw, plain
from benchmarks.step_time import Gpt


def build(word: str, model: Gpt) -> Step:
    dist.init_process_group("gloo")
    if word.startswith("shard"):
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=word == "shard")
        return plain(model, adamw(model))
    replica: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if word == "zero":
        return plain(replica, ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, lr=LEARNING_RATE))
    return plain(replica, adamw(replica))
