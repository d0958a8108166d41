"""Train a small GPT on the characters of text.txt."""

import argparse

import distributedtorch as dt
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler

from gpt import GPT, Text, loss_of, validation_loss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=150)
steps = parser.parse_args().steps

torch.manual_seed(0)
text, unseen = Text("train"), Text("validation")
model = GPT(len(text.alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / steps))
loader = DataLoader(text, batch_size=16, sampler=RandomSampler(text, num_samples=16 * steps))
model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler, plan="zero3", workers=2)

for step, (x, y) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 25 == 0 or step == steps:
        print(f"step {step}: validation loss {validation_loss(model, unseen):.3f}", flush=True)
