"""Train a tiny GPT-2 from scratch on a synthetic token stream."""
import argparse
import math

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


class CountingDataset(Dataset):
    """Sequences x[t+1] = (x[t] + stride) % vocab, with a little noise. Fixed length, no padding."""

    def __init__(self, n, seq_len, vocab_size, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, vocab_size, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        seqs = (start + stride * torch.arange(seq_len)) % vocab_size
        noise = torch.rand(n, seq_len, generator=g) < 0.02
        rand = torch.randint(0, vocab_size, (n, seq_len), generator=g)
        self.data = torch.where(noise, rand, seqs)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return {"input_ids": self.data[idx], "labels": self.data[idx].clone()}


def causal_lm_loss_f64(logits, labels, vocab_size, **kwargs):
    # the stock transformers loss does logits.float(), which throws away float64
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def get_param_groups(model, weight_decay):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim < 2 or name.endswith("bias") or "ln_" in name:
            no_decay.append(p)
        else:
            decay.append(p)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=str, default="hf.pt")
    p.add_argument("--double", action="store_true")
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--weight_decay", type=float, default=0.1)
    p.add_argument("--warmup_ratio", type=float, default=0.1)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    return p.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    if args.double:
        torch.set_default_dtype(torch.float64)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    config = GPT2Config(
        vocab_size=48, n_positions=32, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    model = GPT2LMHeadModel(config).to(device)
    if args.double:
        model.loss_function = causal_lm_loss_f64
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")

    train_ds = CountingDataset(512, 32, config.vocab_size, seed=0)
    loader = DataLoader(train_ds, batch_size=args.batch_size, shuffle=True)

    optimizer = torch.optim.AdamW(get_param_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    total_steps = len(loader) * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, int(total_steps * args.warmup_ratio), total_steps)

    model.train()
    step = 0
    for epoch in range(args.epochs):
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            out = model(input_ids=batch["input_ids"], labels=batch["labels"])
            out.loss.backward()
            grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                loss = out.loss.item()
                print(f"epoch {epoch} step {step}/{total_steps} loss {loss:.4f} ppl {math.exp(loss):.2f} "
                      f"gnorm {grad_norm.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")

    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
