"""PowerSGD: two thin factors of each matrix instead of itself; what they leave out is kept for the next time.

Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019.

Bytes for a matrix of n x m numbers at rank r: r(n + m) of its nm, summed over ranks without codes. Holds what was left
out (as much as the gradients) and the second factors. Use it where links are slow and layers are large matrices; what
is no matrix, or would not get smaller, travels as it is.

Between hosts second factors leave when the next bucket finds that first ones have come, so beside backward; large ones
through shared memory, and all over NCCL, at its end. What was left out is where gradients are added to and what factors
stand for is taken off: for contiguous matrices of 32 or 64 bits nothing as large as a gradient is made anew.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.sync import require_like
from distributedtorch.core.wire import Wire, is_finite
from distributedtorch.wire.twice import Twice, go_on


class PowerSgd(Wire):
    """Sums of low-rank factors, with error feedback."""

    cuts = False

    def __init__(self, comm: Comm, rank: int) -> None:
        self.comm, self.rank = comm, rank
        self.left: dict[str, Tensor] = {}
        """By parameter what its factors left out."""
        self.second: dict[str, Tensor] = {}
        """By parameter its last second factor, from which the next begins."""
        self.begun: deque[Twice] = deque()
        """Sums whose second factors have not left."""

    def all_reduce(self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot]) -> Pending:
        thin = [slot for slot in slots if flat.is_floating_point() and self.gains(slot)]
        if not thin:
            return self.comm.all_reduce(name, flat, bounds)
        factors = _Factors(self, name, flat, [slot for slot in slots if slot not in thin], thin)
        self.comm.pairs.meet(f"{name}/second")
        return go_on(Twice(self.comm, name, factors.first(), factors.second, self.begun))

    def reduce_scatter(
        self, name: str, flat: Tensor, bounds: Sequence[int], slots: Sequence[Slot], out: Tensor | None
    ) -> Pending:
        raise AssertionError("factors are of whole matrices: plans that divide parameters are refused")

    def gains(self, slot: Slot) -> bool:
        """Whether factors are smaller than the parameter."""
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        return rows > 1 and self.rank * (rows + slot.numel // rows) < slot.numel

    def add_left(self, key: str, values: Tensor) -> Tensor:
        """Add values to what was left out before. Result: both."""
        values = values.to(_wide(values))
        before = self.left.get(key)
        if before is None:
            self.left[key] = values.clone(memory_format=torch.contiguous_format)
        else:
            self.left[key] = require_like(key, before, values).to(values.device)
            self.left[key] += values
        return self.left[key]

    def take_back(self, key: str, values: Tensor) -> None:
        """Take values out again, to the last bit of what is larger."""
        self.left[key] -= values
        self.drop_infinite(key)

    def drop_infinite(self, key: str) -> None:
        """Keep nothing where the two together were too large."""
        if not is_finite(self.left[key]):
            del self.left[key]

    def keep_second(self, key: str, total: Tensor) -> None:
        """Keep where the next search begins; near 1 in size, or it would grow with every step until it overflows."""
        size = total.abs().amax()
        self.second[key] = (total.T / size.where(size > 0, 1.0)).contiguous()

    def start(self, key: str, slot: Slot, like: Tensor) -> Tensor:
        """Where the search for the second factor begins: where it ended last time, at first the same on all ranks."""
        rows, columns = slot.shape[0], slot.numel // slot.shape[0]
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
        self.keys = [f"{name}/{slot.index}" for slot in thin]
        self.matrices = [slot.view(flat).reshape(slot.shape[0], -1) for slot in thin]
        """Gradients, until sums take their place."""
        self.added = _finite(self.matrices)
        """Which were added to what was left out; of the others nothing is kept, and all ranks get no number."""
        self.factors: list[Tensor] = []
        """Those of each matrix that the ranks have in common: orthogonal columns."""

    def first(self) -> Pending:
        """Sum first factors, and what has none."""
        parts = []
        with self._exactly():
            for key, slot, matrix, added in zip(self.keys, self.thin, self.matrices, self.added, strict=True):
                both = self.wire.add_left(key, matrix) if added else matrix.to(_wide(matrix)) * torch.nan
                parts.append(both @ self.wire.start(key, slot, both))
        self.shapes = [part.shape for part in parts]
        rest = [slot.view(self.flat).reshape(-1).to(parts[0]) for slot in self.whole]
        self.sent = torch.cat([*(part.reshape(-1) for part in parts), *rest])
        return self._sum("first", self.sent)

    def _exactly(self) -> torch.autocast:
        """Products in the type of factors, also where a backward stands in the user's autocast."""
        return torch.autocast(self.flat.device.type, enabled=False)

    def _sum(self, which: str, values: Tensor) -> Pending:
        bounds = [values.numel() * k // self.comm.world for k in range(self.comm.world + 1)]
        return self.comm.all_reduce(f"{self.name}/{which}", values, bounds)

    def second(self) -> Pending:
        """Sum second factors, and take what all of them stand for off what is left out here."""
        parts = self.sent.split([shape.numel() for shape in self.shapes] + [slot.numel for slot in self.whole])
        firsts, self.rest, seconds = parts[: len(self.thin)], parts[len(self.thin) :], []
        self.good = _finite(firsts)  # the same on all ranks: all have the same sums
        told = zip(self.keys, self.matrices, self.added, firsts, self.shapes, self.good, strict=True)
        for key, matrix, added, part, shape, good in told:
            if good:
                factor, left = torch.linalg.qr(part.view(shape)).Q, self.wire.left[key]
                with self._exactly():
                    seconds.append(factor.T @ left)
                    left.addmm_(factor, seconds[-1], alpha=-1)
            else:
                factor = part.new_full(shape, torch.nan)
                seconds.append(part.new_full((shape[1], matrix.shape[1]), torch.nan))
                if added:
                    self.wire.take_back(key, matrix)
            self.factors.append(factor)
        self.sizes = [second.numel() for second in seconds]
        self.returned = torch.cat([second.reshape(-1) for second in seconds])
        pending = self._sum("second", self.returned)
        pending.tail.append(self._land)
        return pending

    def _land(self) -> None:
        for slot, values in zip(self.whole, self.rest, strict=True):
            slot.view(self.flat).copy_(values.view(slot.shape))
        totals = self.returned.split(self.sizes)
        told = zip(self.keys, self.thin, self.factors, totals, self.good, _finite(totals), strict=True)
        for key, slot, factor, part, begun, good in told:
            total, there = part.view(factor.shape[1], -1), slot.view(self.flat)
            if good:
                self.wire.keep_second(key, total)
            elif begun:
                self.wire.drop_infinite(key)
            with self._exactly():
                if there.is_contiguous() and there.dtype == factor.dtype:
                    torch.mm(factor, total, out=there.view(len(factor), -1))
                else:
                    there.copy_((factor @ total).view(slot.shape))


def _finite(parts: Sequence[Tensor]) -> list[bool]:
    """Which have finite numbers only; a device is asked once where all have."""
    sums = torch.stack([part.sum() for part in parts])
    if bool(torch.isfinite(sums).all()):
        return [True] * len(parts)
    return [is_finite(part) for part in parts]


def _wide(values: Tensor) -> torch.dtype:
    """The type of factors: with 16 bits they would be too rough."""
    return torch.float32 if values.dtype.itemsize < 4 else values.dtype
