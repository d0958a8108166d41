"""PowerSGD: two thin factors of each matrix instead of itself; what they leave out is kept for the next time.

Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019.

Bytes for a matrix of n x m numbers at rank r: r(n + m) of its nm, summed over ranks without codes. Holds what was left
out (as much as the gradients) and the second factors. Use it where links are slow and layers are large matrices; what
is no matrix, or would not get smaller, travels as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.sync import require_like
from distributedtorch.core.wire import Wire


class PowerSgd(Wire):
    """Sums of low-rank factors, with error feedback."""

    cuts = False

    def __init__(self, comm: Comm, rank: int) -> None:
        self.comm, self.rank = comm, rank
        self.left: dict[str, Tensor] = {}
        """By parameter what its factors left out."""
        self.second: dict[str, Tensor] = {}
        """By parameter its last second factor, from which the next begins."""

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        thin = [slot for slot in slots if flat.is_floating_point() and self.gains(slot)]
        if not thin:
            return self.comm.all_reduce(name, flat, bounds)
        return _Factors(self, name, flat, [slot for slot in slots if slot not in thin], thin).pending

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        raise AssertionError("factors are of whole matrices: plans that divide parameters are refused")

    def gains(self, slot: Slot) -> bool:
        """Whether factors are smaller than the parameter."""
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        return rows > 1 and self.rank * (rows + slot.numel // rows) < slot.numel

    def matrix(self, name: str, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter's numbers and what was left out before, as a matrix."""
        values, key = slot.view(flat).reshape(slot.shape[0], -1), f"{name}/{slot.index}"
        values = values.float() if values.dtype.itemsize < 4 else values  # for the factors
        before = self.left.get(key)
        return values.clone() if before is None else values + require_like(key, before, values).to(values.device)

    def start(self, name: str, slot: Slot, like: Tensor) -> Tensor:
        """Where the search for the second factor begins: where it ended last time, at first the same on all ranks."""
        key, rows, columns = f"{name}/{slot.index}", slot.shape[0], slot.numel // slot.shape[0]
        size = (columns, min(self.rank, rows, columns))
        if key not in self.second:
            draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            self.second[key] = torch.randn(size, generator=draw, dtype=torch.float64).to(like)
        return require_like(key, self.second[key], like.new_empty(size)).to(like)

    def state(self) -> dict[str, Tensor]:
        return {**{f"left/{k}": v for k, v in self.left.items()}, **{f"second/{k}": v for k, v in self.second.items()}}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        for kind in ("left", "second"):
            found = {k.removeprefix(f"{kind}/"): v.clone() for k, v in state.items() if k.startswith(f"{kind}/")}
            setattr(self, kind, found)


class _Factors:
    """One exchange under way: first factors, then second ones."""

    def __init__(self, wire: PowerSgd, name: str, flat: Tensor, whole: Sequence[Slot], thin: Sequence[Slot]) -> None:
        self.wire, self.comm, self.name, self.flat, self.thin, self.whole = wire, wire.comm, name, flat, thin, whole
        self.matrices = [wire.matrix(name, flat, slot) for slot in thin]
        first = [m @ wire.start(name, slot, m) for m, slot in zip(self.matrices, thin, strict=True)]
        rest = [slot.view(flat).reshape(-1) for slot in whole]
        self.shapes = [factor.shape for factor in first]
        self.sent = torch.cat([*(factor.reshape(-1) for factor in first), *(one.to(first[0]) for one in rest)])
        self.pending = self._sum("first", self.sent)
        self.pending.tail.append(self._land)

    def _sum(self, which: str, values: Tensor) -> Pending:
        bounds = [values.numel() * k // self.comm.world for k in range(self.comm.world + 1)]
        return self.comm.all_reduce(f"{self.name}/{which}", values, bounds)

    def _land(self) -> None:
        sizes = [shape.numel() for shape in self.shapes] + [slot.numel for slot in self.whole]
        parts = self.sent.split(sizes)
        firsts = [
            torch.linalg.qr(part.view(shape)).Q for part, shape in zip(parts, self.shapes, strict=False)
        ]  # orthogonal columns, the same on all ranks: all have the same sums
        for slot, values in zip(self.whole, parts[len(firsts) :], strict=True):
            slot.view(self.flat).copy_(values.view(slot.shape))
        seconds = [m.T @ first for m, first in zip(self.matrices, firsts, strict=True)]
        sent = torch.cat([second.reshape(-1) for second in seconds])
        self._sum("second", sent).wait()
        sums = sent.split([second.numel() for second in seconds])
        for slot, matrix, first, local, total in zip(self.thin, self.matrices, firsts, seconds, sums, strict=True):
            key, left = f"{self.name}/{slot.index}", matrix - first @ local.T
            if bool(torch.isfinite(total).all()):  # the same on all ranks; after an overflow nothing is kept
                self.wire.second[key] = total.view(local.shape).clone()
                self.wire.left[key] = left
            slot.view(self.flat).copy_((first @ total.view(local.shape).T).view(slot.shape))
