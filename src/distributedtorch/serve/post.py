"""A worker's end of one server: what it brings there, and what it takes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import UsageError, explain
from distributedtorch.serve.board import Refused
from distributedtorch.serve.channel import Kind, Line, Message
from distributedtorch.serve.parcel import ABSENT, Form, Item, Part, joined, key, parted, plain, rows
from distributedtorch.serve.whole import PIECE, Coming, packed

Reduced = Callable[[int, Tensor, int, torch.Generator], Tensor]
"""Number of a tensor, values, the code's key and what is drawn from: a code of them and of what was left out before."""


class Post:
    """Messages to and from one server."""

    def __init__(self, line: Line, items: Sequence[Item], reduced: Reduced | None) -> None:
        self.line, self.items, self.reduced = line, items, reduced
        self.held = -1
        """The version that this worker has; -1: none, everything is to come."""
        self.step = -1
        """The last step of this worker that the server has applied."""

    def ask(self) -> None:
        """Pull."""
        self.line.say(Kind.PULL, held=self.held)

    def bring(self, step: int, values: Sequence[Tensor | None], options: Sequence[float] | None) -> int:
        """Push tensors and, where they travel too, options. Result: bytes."""
        parts = [ABSENT if value is None else self._part(step, number, value) for number, value in enumerate(values)]
        if options is not None:
            parts.append(plain(torch.tensor(options, dtype=torch.float64)))
        message = joined(parts)
        self.line.say(Kind.PUSH, step, message, held=self.held)
        return message.numel()

    def _part(self, step: int, number: int, value: Tensor) -> Part:
        form = self.items[number].pushed
        if form is Form.PLAIN:
            return plain(value)
        if form is Form.ROWS:
            return rows(value)
        assert self.reduced is not None
        known = key("push", self.line.worker, number, step)
        draw = torch.Generator().manual_seed(known)
        return Form.CODE, self.reduced(number, value.detach().reshape(-1), known, draw)

    def fill(self, given: Any) -> int:
        """Give the server what it is to have. Result: bytes.

        Raises:
            UsageError: It does not take it.
        """
        data = packed(given)
        for at in range(0, data.numel(), PIECE):
            self.line.say(Kind.FILL, data.numel(), data[at : at + PIECE], held=at)
            self._hear("does not take what is to be there")
        self.held = -1
        return data.numel()

    def whole(self) -> Any:
        """All that the server keeps beside parameters.

        Raises:
            UsageError: It cannot give it.
        """
        coming: Coming | None = None
        while coming is None or not coming.complete:
            at = 0 if coming is None else coming.had
            self.line.say(Kind.ASK, at)
            message = self._hear("cannot give its optimizer's state")
            assert message.content is not None
            coming = coming or Coming(message.step)
            coming.add(at, message.content)
        return coming.value()

    def _hear(self, what: str) -> Message:
        try:
            return self.line.hear()
        except Refused as error:
            needed, do = "plain state of one model on all processes", "use servers beside ranks (leave apart out)"
            raise UsageError(explain(f"parameter {self.line.name} {what}: {error}", needed, do)) from None

    def take(self, places: Sequence[Tensor]) -> int:
        """Bring tensors to what the server answers. Result: bytes.

        Raises:
            Refused: It says why not, or its answer is none.
        """
        message = self.line.hear()
        assert message.content is not None
        self.held = -1  # until all is there
        for number, (form, data) in enumerate(parted(message.content, len(self.items))):
            known = key("pull", self.line.worker, number, message.version)
            self.items[number].take(form, data, known, places[number])
        self.held, self.step = message.version, message.step
        return message.content.numel()
