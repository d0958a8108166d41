"""A made-up language that a model can learn: the same rows for everybody who asks for the same step.

Words are as frequent as in print (Zipf and Mandelbrot: 1 / (rank + 3)). Each has one follower, drawn by the same
frequencies; it comes next with probability 0.6, otherwise any word does. A model learns the frequencies first, then the
followers of frequent words: the loss falls steadily over hundreds of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

FOLLOWS = 0.6
HELD_OUT = -1
"""The step whose rows nobody is trained on."""


class Language:
    """Rows of words, by the number of a step."""

    def __init__(self, vocabulary: int) -> None:
        frequency = 1 / (torch.arange(vocabulary, dtype=torch.float64) + 3)
        self.cumulative = frequency.cumsum(0) / frequency.sum()
        self.follower = self._words((vocabulary,), torch.Generator().manual_seed(0))

    def rows(self, step: int, num_rows: int, length: int) -> Tensor:
        """The global batch of a step: ids (num_rows, length)."""
        draw = torch.Generator().manual_seed(1000 + step)
        ids = self._words((num_rows, length), draw)
        follows = torch.rand((num_rows, length), generator=draw) < FOLLOWS
        for place in range(1, length):
            ids[:, place] = torch.where(follows[:, place], self.follower[ids[:, place - 1]], ids[:, place])
        return ids

    def _words(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        drawn = torch.rand(shape, generator=draw, dtype=torch.float64)
        return torch.searchsorted(self.cumulative, drawn).clamp_(max=len(self.cumulative) - 1)
