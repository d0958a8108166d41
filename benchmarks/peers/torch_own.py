"""torch's own, over gloo.

- "ddp": `DistributedDataParallel(gradient_as_bucket_view=True)`, the faster of its two modes.
- "ddp, fp16", "ddp, bf16": the same with the hook that casts gradients for the exchange.
- "ddp, powersgd 4": the same with PowerSGD of that rank, from the third step on, the earliest that torch allows, and
  gradients in one bucket, because with several it ends over gloo.
- "ddp, buckets 5": the same with `bucket_cap_mb=5`.
- "zero": the same with `ZeroRedundancyOptimizer` around AdamW.
- "shard": `fully_shard` on every block and on the model; parameters are freed after forward and fetched again.
- "shard, kept": the same with `reshard_after_forward=False`: parameters stay from forward to backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import LEARNING_RATE, Step, adamw, plain
from benchmarks.step_time import Gpt

FIRST_POWERSGD = 2
"""Steps before it, which exchange whole gradients."""


def build(word: str, model: Gpt) -> Step:
    dist.init_process_group("gloo")
    if word.startswith("shard"):
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=word == "shard")
        return plain(model, adamw(model))
    replica = _replica(word, model)
    if word == "zero":
        return plain(replica, ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, lr=LEARNING_RATE))
    return plain(replica, adamw(replica))


def _replica(word: str, model: Gpt) -> DistributedDataParallel:
    kind, _, number = word.removeprefix("ddp, ").partition(" ")
    megabytes = int(number) if kind == "buckets" else None
    if kind == "powersgd":
        megabytes = 1024  # one bucket: over gloo its exchanges of several get mixed up, and the ranks end
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    if kind == "fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif kind == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=int(number), start_powerSGD_iter=FIRST_POWERSGD)
        replica.register_comm_hook(state, powerSGD_hook)
    return replica
