"""The loop of single.py with a stopwatch and a pair of scales: what demo.py runs, in one process and under plans."""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import distributedtorch as dt
import torch
from distributedtorch.core.world import here
from safetensors.torch import save_file
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler

from gpt import GPT, Text, loss_of, validation_loss


def bytes_sent() -> int:
    """Bytes this rank has sent so far."""
    return sum(traffic.bytes_sent for traffic in here().comm.traffic.values())


def bytes_kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes this rank keeps from one step to the next, by kind."""
    members = here().loop.members
    if members:
        return dict(sum((Counter(member.sync.bytes_held()) for member in members), Counter()))
    kinds = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": [v for state in optimizer.state.values() for v in state.values()],
    }
    return {kind: sum(t.numel() * t.element_size() for t in tensors) for kind, tensors in kinds.items()}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--folder", type=Path, default=Path(), help="where result.json and weights.safetensors go")
arguments = parser.parse_args()
steps = arguments.steps

torch.manual_seed(0)
text, unseen = Text("train"), Text("validation")
model = GPT(len(text.alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / steps))
loader = DataLoader(text, batch_size=16, sampler=RandomSampler(text, num_samples=16 * steps))
model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler)

losses, seconds, sent = [], [], []
for step, (x, y) in enumerate(loader, start=1):
    began, before = time.perf_counter(), bytes_sent()
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    seconds.append(time.perf_counter() - began)
    sent.append(bytes_sent() - before)
    losses.append(dt.mean(loss.detach()).item())
    dt.print(json.dumps({"step": step, "loss": losses[-1]}), flush=True)

if dt.is_main():
    result = {
        "losses": losses,
        "validation": validation_loss(model, unseen),
        "bytes_kept": bytes_kept(model, optimizer),
        "bytes_sent": statistics.median(sent),
        "seconds": statistics.median(seconds),
    }
    (arguments.folder / "result.json").write_text(json.dumps(result))
    save_file(
        {name: p.detach().clone() for name, p in model.named_parameters()}, arguments.folder / "weights.safetensors"
    )
