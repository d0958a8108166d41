"""What each process of a pool runs: every wire beside its algorithm written out by hand.

`-m tests.conformance.wires_pool [forget]`: faults raise. With `forget`, what codes leave out is not kept.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.bucket import Slot
from distributedtorch.core.wire import TURN, travelling
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.wire.feedback import Coded
from distributedtorch.wire.powersgd import PowerSgd
from tests.conformance.loose_pool import compare

STEPS = 5
Lossy = Callable[[Tensor, int, torch.Generator], Tensor]
"""Values, what all ranks know of an exchange, and what a rank draws from: what arrives of them."""


def bf16(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    return values.bfloat16().double()


def fp16(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    out = values.clone()
    for k in range(0, len(values), 2048):
        block = values[k : k + 2048]
        largest = block.abs().max().float().double()
        out[k : k + 2048] = (block / largest).half().double() * largest if largest else 0.0
    return out


def int8(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    out, piece = values.clone(), 1 << 19
    assert len(values) <= piece
    order = torch.randperm(piece, generator=torch.Generator().manual_seed(piece)).double()
    noise = ((order + 0.5) / piece).roll(-int(torch.randint(piece, (), generator=draw)))
    for k in range(0, len(values), 256):
        block = values[k : k + 256]
        step = (block.abs().max() / 127 * (1 + 2**-20)).float().double()
        steps = (block / step + noise[k : k + len(block)]).floor() if step else block * 0
        out[k : k + 256] = steps * step
    return out


def levels(count: int, apart: float, values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    out = values.clone()
    for k in range(0, len(values), 256):
        block = values[k : k + 256]
        half = (apart / 2 * block.pow(2).mean().sqrt()).float().double()
        every = half * torch.arange(1 - count, count, 2, dtype=torch.float64)
        out[k : k + 256] = every[(block.unsqueeze(1) - every).abs().argmin(dim=1)]
    return out


def sign(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    out = values.clone()
    for k in range(0, len(values), 2048):
        block = values[k : k + 2048]
        out[k : k + 2048] = torch.where(block >= 0, 1.0, -1.0) * (block.abs().sum() / len(block)).float().double()
    return out


def topk(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    count = max(1, round(0.1 * len(values)))
    least = values.abs().sort(descending=True).values[count - 1]
    return torch.where(values.abs() >= least, values, 0.0)


def randomk(values: Tensor, key: int, draw: torch.Generator) -> Tensor:
    count = max(1, round(0.1 * len(values)))
    every = torch.Generator().manual_seed(key)
    shift = int(torch.randint(len(values), (), generator=every))
    out = torch.zeros_like(values)
    for k, part in enumerate(torch.rand(count, generator=every, dtype=torch.float64).tolist()):
        first, end = k * len(values) // count, (k + 1) * len(values) // count
        place = (shift + first + int(part * (end - first))) % len(values)
        out[place] = values[place]
    return out


CODES: dict[str, tuple[Lossy, bool]] = {
    "bf16": (bf16, False),
    "fp16": (fp16, False),
    "int8": (int8, False),
    "int4": (partial(levels, 16, 0.3352), True),
    "int2": (partial(levels, 4, 0.9957), True),
    "sign": (sign, True),
    "topk(0.1)": (topk, True),
    "randomk(0.1)": (randomk, True),
}


class ByHand:
    """The sum of every rank's numbers, each exchange as the algorithm says; one process plays all ranks."""

    def __init__(self, lossy: Lossy, *, feedback: bool) -> None:
        self.lossy, self.feedback = lossy, feedback
        self.left: dict[object, Tensor] = {}

    def __call__(
        self, name: str, count: int, parts: list[Tensor], bounds: tuple[int, ...], *, half: bool = False
    ) -> Tensor:
        world, key = len(parts), zlib.crc32(f"{name} {count}".encode())
        draws = [torch.Generator().manual_seed(key * world + rank) for rank in range(world)]
        total = torch.zeros_like(parts[0])
        for rank, part in enumerate(parts):
            for owner in range(world):
                piece = slice(bounds[owner], bounds[owner + 1])
                arrived = part[piece]
                if rank != owner:
                    arrived = self._arrives((name, rank, owner), arrived, key, draws[rank])
                total[piece] += arrived
        for owner in range(0 if half else world):
            piece = slice(bounds[owner], bounds[owner + 1])
            total[piece] = self._arrives((name, owner), total[piece].clone(), key, draws[owner])
        return total

    def each(self, name: str, count: int, flat: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """What arrives of every owner's range."""
        world, key = len(bounds) - 1, zlib.crc32(f"{name} {count}".encode())
        flat = flat.clone()
        for owner in range(world):
            piece = slice(bounds[owner], bounds[owner + 1])
            draw = torch.Generator().manual_seed(key * world + owner)
            if piece.stop > piece.start:
                flat[piece] = self.lossy(flat[piece].clone(), key, draw)
        return flat

    def _arrives(self, which: object, values: Tensor, key: int, draw: torch.Generator) -> Tensor:
        if not values.numel():
            return values
        if self.feedback:
            values = values + self.left.get(which, torch.zeros_like(values))
        found = self.lossy(values, key, draw)
        self.left[which] = values - found
        return found


class Factored:
    """PowerSGD for one matrix, all ranks in one process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.left, self.second = rank, {}, {}  # type: ignore[var-annotated]

    def __call__(self, key: str, parts: list[Tensor]) -> Tensor:
        if key not in self.second:
            draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            self.second[key] = torch.randn(parts[0].shape[1], self.rank, generator=draw, dtype=torch.float64)
            self.left[key] = [torch.zeros_like(part) for part in parts]
        parts = [part + rest for part, rest in zip(parts, self.left[key], strict=True)]
        first = torch.linalg.qr(sum(part @ self.second[key] for part in parts)).Q
        seconds = [part.T @ first for part in parts]
        self.second[key] = sum(seconds)
        self.left[key] = [part - first @ second.T for part, second in zip(parts, seconds, strict=True)]
        return first @ self.second[key].T


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 50), nn.Tanh(), nn.Linear(50, 3))


def rows_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients(model: nn.Module, step: int) -> list[list[Tensor]]:
    """Every rank's, divided by the number of ranks, in the order in which they are laid out."""
    out = []
    for rank in range(dt.world()):
        params = list(model.parameters())[::-1]
        out.append([g / dt.world() for g in torch.autograd.grad(loss_of(model, rows_of(step, rank)), params)])
    return out


def truth(wire: str, by_hand: ByHand | None = None, *, number: int = 0, delay: int = 0) -> list[Tensor]:
    """ddp with a wire; `number`: of the optimizer; `delay`: how many steps later gradients are applied."""
    model, world = net(1 + number), dt.world()
    params = list(model.parameters())[::-1]
    optimizer = adam(model)
    rank = int(wire[-2]) if wire.startswith("powersgd") else 0
    like = PowerSgd(here().comm, rank) if rank else Coded(here().comm, None)  # type: ignore[arg-type]
    lossy, feedback = CODES.get(wire, (bf16, False))
    by_hand, factored = by_hand or ByHand(lossy, feedback=feedback), Factored(rank)
    flying: list[dict[int, Tensor]] = [{}] * delay
    for step in range(STEPS):
        every, new = gradients(model, step), dict[int, Tensor]()
        for place, slab in enumerate(travelling(params, like, world)):
            flats = [laid_out(slab.numel, slab.slots, grads) for grads in every]
            if rank:
                total = sum(flats)
                for slot in slab.slots:
                    matrices = [slot.view(flat) for flat in flats]
                    if rank * sum(matrices[0].shape) < slot.numel and matrices[0].dim() > 1:
                        turn = TURN if delay and step % 2 else ""  # it knows too late what the last step left out
                        name = f"gradients/{number}{turn}/{place}.0/{slot.index}"
                        slot.view(total).copy_(factored(name, matrices))
            elif all(slot.numel < 1024 for slot in slab.slots):
                total = sum(flats)
            else:
                total = torch.zeros(slab.numel)
                for k, bucket in enumerate(slab.buckets):
                    found = by_hand(f"gradients/{number}/{place}.{k}", step + 1, flats, bucket.bounds)
                    span = slice(bucket.bounds[0], bucket.bounds[-1])
                    total[span] = found[span]
            for slot in slab.slots:
                new[slot.index] = slot.view(total).clone()  # type: ignore[arg-type]
        flying.append(new)
        apply(optimizer, params, flying.pop(0))
    return [param.detach() for param in model.parameters()]


def apply(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: dict[int, Tensor]) -> None:
    for index, param in enumerate(params):
        param.grad = grads.get(index)
    optimizer.step()


def laid_out(numel: int, slots: tuple[Slot, ...], grads: list[Tensor]) -> Tensor:
    flat = torch.zeros(numel)
    for slot in slots:
        slot.view(flat).copy_(grads[slot.index])
    return flat


def distributed(plan: str) -> list[Tensor]:
    model = net()
    model, optimizer = dt.distribute(model, adam(model), plan=plan, batches="own")
    for step in range(STEPS):
        loss_of(model, rows_of(step, dt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def divided(wire: str, *, whole: bool = False, delay: int = 0) -> list[Tensor]:
    """zero1 and zero2 with a wire: sums go to their owners, changes of parameters to all."""
    model, world = net(), dt.world()
    params = list(model.parameters())[::-1]
    exact = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = torch.optim.AdamW(exact, lr=1e-2)
    lossy, feedback = CODES[wire]
    gradient, change = ByHand(lossy, feedback=feedback), ByHand(lossy, feedback=False)
    like = Coded(here().comm, None)  # type: ignore[arg-type]
    slabs = travelling(params, like, world, whole=whole)
    flying: list[dict[int, Tensor]] = [{}] * delay
    for step in range(STEPS):
        every, new = gradients(model, step), dict[int, Tensor]()
        for number, slab in enumerate(slabs):
            flats = [laid_out(slab.numel, slab.slots, grads) for grads in every]
            total = sum(flats)
            if any(slot.numel >= 1024 for slot in slab.slots):
                for k, bucket in enumerate(slab.buckets):
                    found = gradient(f"gradients/0/{number}.{k}", step + 1, flats, bucket.bounds, half=True)
                    span = slice(bucket.bounds[0], bucket.bounds[-1])
                    total[span] = found[span]  # type: ignore[index]
            for slot in slab.slots:
                new[slot.index] = slot.view(total).clone()  # type: ignore[arg-type]
        flying.append(new)
        apply(optimizer, exact, flying.pop(0))
        for number, slab in enumerate(slabs):
            moved = [e.detach() - p.detach() for e, p in zip(exact, params, strict=True)]
            flat = laid_out(slab.numel, slab.slots, moved)
            if any(slot.numel >= 1024 for slot in slab.slots):
                for k, bucket in enumerate(slab.buckets):
                    flat = change.each(f"parameters/0/{number}.{k}", step + 1, flat, bucket.bounds)
            for slot in slab.slots:
                params[slot.index].data += slot.view(flat)
    return [param.detach() for param in model.parameters()]


def in_rounds(wire: str, by_hand: ByHand | None = None, *, outer: bool = False, delay: int = 0) -> list[Tensor]:
    """local(every=2), or diloco(every=2), with a wire: changes since the last round travel, for `delay` steps."""
    world = dt.world()
    replicas = [net() for _ in range(world)]
    optimizers = [adam(replica) for replica in replicas]
    lossy, feedback = CODES[wire]
    by_hand = by_hand or ByHand(lossy, feedback=feedback)
    anchor = [p.detach().clone() for p in net().parameters()][::-1]
    speed = [torch.zeros_like(a) for a in anchor]
    like = Coded(here().comm, None)  # type: ignore[arg-type]
    stood: list[list[Tensor]] = []
    for step in range(STEPS):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            loss_of(replica, rows_of(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            total_of: dict[int, Tensor] = {}
            stood = [[p.detach().clone() for p in list(r.parameters())[::-1]] for r in replicas]
            moved = [[(p - a) / world for p, a in zip(one, anchor, strict=True)] for one in stood]
            for number, slab in enumerate(travelling(anchor, like, world)):
                flats = [laid_out(slab.numel, slab.slots, one) for one in moved]
                total = sum(flats)
                if any(slot.numel >= 1024 for slot in slab.slots):
                    for k, bucket in enumerate(slab.buckets):
                        found = by_hand(f"round/0/{number}.{k}", step // 2 + 1, flats, bucket.bounds)
                        span = slice(bucket.bounds[0], bucket.bounds[-1])
                        total[span] = found[span]  # type: ignore[index]
                total_of |= {slot.index: slot.view(total) for slot in slab.slots}  # type: ignore[arg-type]
        if stood and step % 2 == (1 + delay) % 2:
            for index, change in total_of.items():
                if outer:
                    speed[index] = 0.6 * speed[index] - change
                    change = 0.7 * (change - 0.6 * speed[index])
                anchor[index] += change
            for replica, one in zip(replicas, stood, strict=True):
                for param, was, value in zip(list(replica.parameters())[::-1], one, anchor, strict=True):
                    param.data.copy_(value + (param.data - was))
            stood = []
    return [param.detach() for param in copy.copy(replicas[dt.rank()]).parameters()]


def forget() -> None:
    """Let wires not keep what they leave out."""
    kept = Coded.reduced

    def reduced(self: Coded, which: str, *rest: object) -> Tensor:
        self.left.pop(which, None)
        return kept(self, which, *rest)  # type: ignore[arg-type]

    Coded.reduced = reduced  # type: ignore[method-assign]


def main() -> None:
    for wire in [*CODES, "powersgd(rank=1)", "powersgd(rank=2)"]:
        compare(f"ddp,wire={wire}", truth(wire), distributed(f"ddp,wire={wire}"))
        release()
    for number, wire in enumerate(CODES):
        plan = f"zero{1 + number % 2},wire={wire}"
        compare(plan, divided(wire), distributed(plan))
        release()
    for wire in CODES:
        for sync in ("local", "diloco"):
            plan = f"{sync}(every=2),wire={wire}"
            compare(plan, in_rounds(wire, outer=sync == "diloco"), distributed(plan))
            release()
        plan = f"local(every=2),delay=1,wire={wire}"
        compare(plan, in_rounds(wire, delay=1), distributed(plan))
        release()
    dt.print("wires as written out")


if __name__ == "__main__":
    dt.barrier()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if sys.argv[1:] == ["forget"]:
        forget()
    main()
