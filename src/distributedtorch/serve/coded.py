"""What workers have of the tensors that travel to them in codes, as far as a server knows.

A server sends a code of the difference between its tensor and a worker's copy; both add what the code says, so that
what it leaves out is in the next difference. A worker names the version it has with every request: a code that did not
arrive is not counted, and who has something else gets everything. Holds a copy per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distributedtorch.serve.parcel import ABSENT, Form, Item, Part, key, plain


@dataclass(kw_only=True)
class Copy:
    """One worker's."""

    version: int
    """The last one that it is known to have."""
    values: dict[int, Tensor]
    """By number of the tensor."""
    sent: dict[int, Tensor] = field(default_factory=dict)
    """Codes on their way to it."""
    sent_version: int = -1
    """The version that it has when they arrive."""


class Copies:
    """Those of all workers."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = {number: item for number, item in enumerate(items) if item.code is not None}
        self.of: dict[int, Copy] = {}

    def told(self, worker: int, held: int) -> None:
        """A worker says which version it has."""
        copy = self.of.get(worker)
        if copy is None or held == copy.version:
            return
        if not copy.sent or held != copy.sent_version:
            del self.of[worker]
            return
        for number, code in copy.sent.items():
            item, known = self.items[number], key("pull", worker, number, held)
            copy.values[number] += item.read(Form.CODE, code, known)
        copy.version, copy.sent = held, {}

    def give(self, worker: int, version: int, tensors: Sequence[Tensor]) -> dict[int, Part]:
        """What brings a worker near the present version: everything, or codes of what is missing."""
        copy = self.of.get(worker)
        if copy is None:
            values = {number: tensors[number].detach().clone() for number in self.items}
            self.of[worker] = Copy(version=version, values=values)
            return {number: plain(value) for number, value in values.items()}
        if copy.version == version:
            return dict.fromkeys(self.items, ABSENT)
        if not copy.sent or copy.sent_version != version:
            missing = {number: tensors[number].detach() - copy.values[number] for number in self.items}
            copy.sent = {number: self._code(worker, number, version, value) for number, value in missing.items()}
            copy.sent_version = version
        return {number: (Form.CODE, code) for number, code in copy.sent.items()}

    def _code(self, worker: int, number: int, version: int, missing: Tensor) -> Tensor:
        code, known = self.items[number].code, key("pull", worker, number, version)
        assert code is not None
        return code.encode(missing.reshape(-1), known, torch.Generator().manual_seed(known))
