"""A small GPT over characters, and the text it learns: what all examples share."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

CONTEXT = 64
ADDED = ("out.weight", "mlp.2.weight")


class Text(Dataset):
    """text.txt as windows of CONTEXT characters, each with the characters one place further on as targets.

    The first nine tenths are for training, one window per character; the rest, without overlap, is for validation.
    """

    def __init__(self, part: str) -> None:
        text = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        numbers = torch.tensor([self.alphabet.index(character) for character in text])
        cut = len(numbers) * 9 // 10
        self.numbers, self.stride = (numbers[:cut], 1) if part == "train" else (numbers[cut:], CONTEXT)

    def __len__(self) -> int:
        return (len(self.numbers) - CONTEXT - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.numbers[index * self.stride :][: CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a small network per position; each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # (batch, time, 3 x width) -> three of (batch, heads, time, width / heads)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters in, scores of the next character out. The embedding is also the last layer's weight."""

    def __init__(self, characters: int, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # what is added to the stream starts smaller: there are 2 x depth such layers
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5 if name.endswith(ADDED) else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over all characters of a batch."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text) -> float:
    """The loss on all of `text`, as one batch."""
    model.eval()
    loss = loss_of(model, *default_collate(list(text)))
    model.train()
    return loss.item()
