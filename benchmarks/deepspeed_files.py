"""Checkpoints made by DeepSpeed itself, with what they hold written beside by other means: material for the import.

Needs an environment of its own with deepspeed, and no GPU:
`DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 benchmarks/deepspeed_files.py FOLDER --stage 3 [--bf16]`
writes FOLDER/checkpoint (DeepSpeed's files after some steps) and FOLDER/expected.pt (whole fp32 weights, and in stage 3
Adam's moments, gathered through DeepSpeed's own interface; the losses of the steps that follow). Parameters of odd
sizes, two groups, tied weights, a frozen one and a buffer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, BATCH, LENGTH = 29, 13, 8, 7
STEPS, MORE = 4, 3


class Model(nn.Module):
    """A small language model whose last layer is its first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + (self.fixed * self.scale).to(x.dtype)  # DeepSpeed leaves buffers in fp32
        return self.head(self.norm(x + self.middle(x).tanh()))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    free = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in free if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in free if p.dim() == 1], "weight_decay": 0.0},
    ]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95))


def batch(step: int) -> Tensor:
    """The whole batch of a step; every rank takes its rows."""
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    out = model(words[:, :-1]).float()
    return F.cross_entropy(out.reshape(-1, WORDS), words[:, 1:].reshape(-1))


def main() -> None:
    """One rank."""
    import deepspeed
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sub-group", type=int, default=10**9, help="stage 3 updates so many parameters at a time")
    asked = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {
            "stage": asked.stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": asked.sub_group,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": asked.bf16},
    }
    torch.backends.mkldnn.enabled = not asked.bf16  # type: ignore[assignment]  # not every CPU has its bf16 products
    torch.manual_seed(0)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            engine.save_checkpoint(str(asked.folder / "checkpoint"))
            expected = gathered(engine, stage=asked.stage)
        loss = loss_of(engine, batch(step)[rank::world])
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / world)
    if rank == 0:
        torch.save({**expected, "losses": losses[STEPS:], "step": STEPS}, asked.folder / "expected.pt")
    dist.destroy_process_group()


def gathered(engine: Any, *, stage: int) -> dict[str, dict[str, Tensor]]:
    """Whole fp32 weights, and the optimizer's moments, by name."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found["weights"][name] = safe_get_full_fp32_param(param).detach().clone()
            for moment in ("exp_avg", "exp_avg_sq") if stage == 3 else ():  # stages 1 and 2 do not give them out
                found[moment][name] = safe_get_full_optimizer_state(param, moment).detach().clone()
            continue
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            found["weights"][name] = param.detach().float().clone()
    return found


if __name__ == "__main__":
    main()
