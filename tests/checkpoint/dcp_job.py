"""What the two processes of the DCP test run: `dcp_job.py FOLDER`. A fully_shard model after some steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # fully_shard needs it: imported once, before the fork
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        adam.zero_grad()
        model(batch(step)[rank::2]).square().mean().backward()
        adam.step()
    for name, flat in (("nested", False), ("flat", True)):
        weights, state = get_state_dict(model, adam, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        dcp.save({"app": {"model": weights, "optim": state, "epoch": 2}}, checkpoint_id=folder / name)
    whole, state = get_state_dict(model, adam, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        moments = {f"{n}/{k}": v for n, values in state["state"].items() for k, v in values.items()}  # type: ignore[union-attr]
        save_file({k: v.contiguous() for k, v in {**whole, **moments}.items()}, folder / "expected.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    other = os.fork()  # before torch has any thread: what was imported is there already
    main(Path(sys.argv[1]), 0 if other else 1)
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
