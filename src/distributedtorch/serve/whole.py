"""All that a server has, on its way to a worker or back: values, optimizer state, options; plain data in pieces.

A worker fills servers of processes of their own with what its model and optimizer have, at the start and when both were
loaded; with parameters alone when these were. It asks for the optimizer's state when that is to be saved. Nobody pushes
meanwhile.
Travels: parameters Psi and state K Psi to the servers, K Psi back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distributedtorch.core import plain
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.serve.board import Refused

PIECE = 4 << 20
"""Bytes that travel at a time."""


def packed(value: Any) -> Tensor:
    """Plain data as bytes.

    Raises:
        UsageError: It is none.
    """
    try:
        return torch.frombuffer(bytearray(plain.pack(value)), dtype=torch.uint8)
    except TypeError as error:
        given = f"an optimizer that keeps {error} in its state, under servers in processes of their own"
        do = "use servers beside ranks (leave apart out), or another optimizer"
        raise UsageError(explain(given, "tensors, numbers and text, which can travel", do)) from None


class Coming:
    """Pieces that arrive one after the other."""

    def __init__(self, total: int) -> None:
        self.data, self.had = torch.empty(total, dtype=torch.uint8), 0

    def add(self, at: int, piece: Tensor) -> None:
        """Take a piece; the last one may come again.

        Raises:
            Refused: Another one was to come.
        """
        if at > self.had or at + piece.numel() > self.data.numel():
            raise Refused(f"bytes {at} to {at + piece.numel()} of {self.data.numel()}, where {self.had} have come")
        self.data[at : at + piece.numel()] = piece
        self.had = max(self.had, at + piece.numel())

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self.had == self.data.numel()

    def value(self) -> Any:
        """What they say."""
        return plain.unpack(self.data.numpy().tobytes())
