"""DeepSpeed on the CPU: the word is the stage of ZeRO, the optimizer torch's AdamW, no clipping, the rest by default.

It runs over gloo. The shared-memory kernel that DeepSpeed compiles at start serves its inference only: gradients go
through `torch.distributed.all_reduce` and relatives.
"""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import deepspeed
from torch import Tensor, nn

from benchmarks.peers.loop import Step, adamw, loss_of


def build(word: str, model: nn.Module) -> Step:
    deepspeed.init_distributed("gloo")
    options = {
        "train_micro_batch_size_per_gpu": 1,  # only a name for what is given: it scales nothing without accumulation
        "gradient_clipping": 0.0,  # its default of 1.0 would be other mathematics than everybody else's
        "zero_optimization": {"stage": int(word)},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=options)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
