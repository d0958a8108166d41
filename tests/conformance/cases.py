"""The equality matrix: which training runs must give the same weights as one process, written out as plain loops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cpu")
ROWS, BATCH, WINDOW = 50, 7, 3  # 8 batches an epoch, the last of one row
PLANS, WORLDS = ("ddp", "zero1", "zero2", "zero3"), (1, 2, 3, 4)
OPTIMIZERS, MODELS = ("sgd", "adamw", "adafactor"), ("cnn", "tied", "heads")
ACCUMULATIONS, CLIPS = ("none", "word", "hand"), (False, True)
BUCKET_BYTES = 2048  # float64: the smallest model has 4 buckets and a parameter larger than one


@dataclass(frozen=True)
class Training:
    """One training run, whatever it is distributed over."""

    optimizer: str
    model: str
    accumulation: str
    clip: bool
    dtype: str = "float64"

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class Case:
    """A training run under a plan at a world size."""

    training: Training
    plan: str
    world: int


class Cnn(nn.Module):
    """Convolutions with BatchNorm, no bias before it (its true gradient is zero, which Adam amplifies)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x.view(-1, 1, 8, 8))))
        x = F.relu(self.norm2(self.second(x)))
        return F.cross_entropy(self.out(x.flatten(1)), y % 5)


class Tied(nn.Module):
    """A transformer whose embedding is its output layer (no biases: a key's has a true gradient of zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, bias=False)
        self.out = nn.Linear(16, 31, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = (x[:, :13].abs() * 10).long() % 31
        mask = nn.Transformer.generate_square_subsequent_mask(12, x.device, x.dtype)
        logits = self.out(self.block(self.embed(tokens[:, :-1]), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Heads(nn.Module):
    """Heads used only by the rows that ask for them: unused on some ranks, on all, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(24, 3) for _ in range(4))
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        trunk = self.trunk(x)
        out = x.new_zeros(len(x), 3)
        for number, head in enumerate(self.heads):
            mine = (y // 7) % 4 == number
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), head(trunk[mine]))
        return F.mse_loss(out, x[:, :3])


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 64, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    return TensorDataset(x, torch.randint(0, 20, (ROWS,), generator=generator).to(DEVICE))


def make(training: Training) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    dtype = getattr(torch, training.dtype)
    torch.manual_seed(3)
    model = {"cnn": Cnn, "tied": Tied, "heads": Heads}[training.model]().to(DEVICE, dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}], lr=4e-3
        ),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=0.02),
    }[training.optimizer]()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.8)
    return model, optimizer, DataLoader(data(dtype), BATCH, shuffle=True), scheduler


def plan_of(case: Case) -> str:
    return case.plan + (f",accumulate={WINDOW}" if case.training.accumulation == "word" else "")


def permuted(x: Tensor, y: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The same rows in another order, for the rounding noise; order 0 is as given."""
    if order == 0:
        return x, y
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(order)).to(x.device)
    return x[rows], y[rows]


def train(training: Training, distribute: Callable[..., Any] | None = None, order: int = 0) -> nn.Module:
    """The user's loop."""
    model, optimizer, loader, scheduler = make(training)
    epochs = 4 if training.accumulation == "none" else 12  # at least 30 optimizer steps
    if distribute is not None:
        model, optimizer, loader, scheduler = distribute(model, optimizer, loader, scheduler)
    seen = 0
    for _ in range(epochs):
        for x, y in loader:
            loss = model(*permuted(x, y, order))
            if training.accumulation == "hand":
                (loss / WINDOW).backward()
                seen += 1
                if seen % WINDOW:
                    continue
            else:
                loss.backward()
            _update(training, model, optimizer, scheduler)
    return model


def train_by_windows(training: Training, order: int = 0) -> nn.Module:
    """What `accumulate=3` means, written out: the mean over all rows of up to three batches of one epoch."""
    model, optimizer, loader, scheduler = make(training)
    for _ in range(12):
        batches = list(loader)
        for start in range(0, len(batches), WINDOW):
            window = batches[start : start + WINDOW]
            rows = sum(len(x) for x, _ in window)
            for x, y in window:
                (model(*permuted(x, y, order)) * len(x) / rows).backward()
            _update(training, model, optimizer, scheduler)
    return model


def _update(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if training.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def truth(training: Training, order: int = 0) -> nn.Module:
    return train_by_windows(training, order) if training.accumulation == "word" else train(training, order=order)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a parameter or buffer, and its name."""
    worst, where = 0.0, ""
    for name, value in one.items():
        gap = float(
            (other[name].cpu().double() - value.cpu().double()).norm() / value.cpu().double().norm().clamp_min(1e-12)
        )
        if not gap <= worst:
            worst, where = gap, name
    return worst, where


def all_trainings(dtype: str = "float64") -> Iterator[Training]:
    for optimizer, model, accumulation, clip in product(OPTIMIZERS, MODELS, ACCUMULATIONS, CLIPS):
        yield Training(optimizer, model, accumulation, clip, dtype)


def covering(world: int) -> list[Case]:
    """A subset in which every plan meets every other setting, other ones at every world size, fewer at the larger."""
    cases = []
    for number, training in enumerate(all_trainings()):
        cases.append(Case(training, PLANS[(number + number // 6 + number // 18 + world) % len(PLANS)], world))
    every, first = {1: (10, 1), 2: (7, 2), 3: (7, 0), 4: (11, 10)}[world]
    return [case for number, case in enumerate(cases) if (number + number // 3 + first) % every == 0]
