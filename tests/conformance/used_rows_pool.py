"""What each process of a pool runs: tables of which only used rows travel, beside that written out.

`-m tests.conformance.used_rows_pool [forget]`: faults raise. With `forget`, what codes leave out of rows is not kept.
"""

from __future__ import annotations

import sys
import zlib

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.rows import Rows
from tests.conformance.wires_pool import CODES

NUMBER, WIDTH, STEPS = 1024, 256, 4
SPARE = 40
"""Tokens that a step has of a rank, of ids below this: most are used again in a later step, not in the next."""


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(NUMBER, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(SPARE, (7,), generator=torch.Generator().manual_seed(10 * step + rank)) * 17


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - ids.double().unsqueeze(1).sin()).square().mean()


def truth(wire: str) -> tuple[list[Tensor], set[int]]:
    """The trained parameters, one process playing all ranks; the rows that were used."""
    (lossy, feedback), model, world = CODES[wire], net(), dt.world()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    left = {which: torch.zeros(NUMBER, WIDTH) for which in [*range(world), "sums"]}

    def arrives(which: object, rows: list[int], values: Tensor, key: int, draw: torch.Generator) -> Tensor:
        whole = values + left[which][rows] if feedback else values  # type: ignore[index]
        found = lossy(whole.flatten(), key, draw).view(whole.shape)
        left[which][rows] = whole - found  # type: ignore[index]
        return found

    seen = set[int]()
    for step in range(STEPS):
        parts = []
        for rank in range(world):
            grads = torch.autograd.grad(loss_of(model, ids_of(step, rank)), list(model.parameters()))
            parts.append([grad / world for grad in grads])
        key = zlib.crc32(f"gradients/rows/0/0 {step + 1}".encode())
        draws = [torch.Generator().manual_seed(key * world + rank) for rank in range(world)]
        used = sorted({int(one) for rank in range(world) for one in ids_of(step, rank)})
        of_each = [[row for row in used if row % world == owner] for owner in range(world)]
        sums = [parts[owner][0][rows] for owner, rows in enumerate(of_each)]
        for rank in range(world):
            for owner, rows in enumerate(of_each):
                if rank != owner and rows:
                    sums[owner] = sums[owner] + arrives(rank, rows, parts[rank][0][rows], key, draws[rank])
        total = torch.zeros(NUMBER, WIDTH)
        for owner, rows in enumerate(of_each):
            if rows:
                total[rows] = arrives("sums", rows, sums[owner], key, draws[owner])
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = torch.stack(grads).sum(dim=0)
        next(iter(model.parameters())).grad = total
        optimizer.step()
        seen |= set(used)
    return [param.detach() for param in model.parameters()], seen


def trained(wire: str, *, forget: bool) -> tuple[nn.Module, int]:
    """What the library makes of it, and the bytes that went for sums."""
    model = net()
    model, optimizer = dt.distribute(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=f"ddp,wire={wire}", batches="own"
    )
    (rows,) = [member.sync for member in here().loop.members if isinstance(member.sync, Rows)]
    before = dt.stats().bytes_sent.get("all-reduce", 0)
    for step in range(STEPS):
        loss_of(model, ids_of(step, dt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = rows.own_state()
        rows.loaded()
        if not forget:
            rows.take_own_state(state)
    return model, dt.stats().bytes_sent["all-reduce"] - before


def as_written_out(wire: str, *, forget: bool) -> None:
    wanted, seen = truth(wire)
    model, sent = trained(wire, forget=forget)
    for name, param, want in zip(("table", "weight", "bias"), model.parameters(), wanted, strict=True):
        apart = float((param.detach() - want).abs().max())
        assert apart <= 1e-9, f"{wire}: {name} is {apart:.1e} from what is written out"
    table, start = next(iter(model.parameters())).detach(), net()[0].weight.detach()
    still = [row for row in range(NUMBER) if row not in seen]
    decayed = start[still] * (1 - 1e-4) ** STEPS
    torch.testing.assert_close(table[still], decayed, rtol=1e-12, atol=0)
    most = STEPS * 2 * (len(seen) * WIDTH + 2048) * 3 + STEPS * 3 * 8 * 2 * (WIDTH * 3 + 64)
    assert sent <= most < STEPS * NUMBER * WIDTH, f"{wire}: {sent} bytes for {len(seen)} rows"
    release()


def not_finite_reaches_all() -> None:
    model = net()
    model, _ = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="ddp,wire=int2", batches="own")
    factor = torch.nan if dt.rank() == 0 else 1.0
    (model(torch.tensor([5, 6, 7, 8])).mean() * factor).backward()
    grad = next(iter(model.parameters())).grad
    assert grad is not None and bool(grad[5:9].isnan().any(dim=1).all())
    assert not bool(grad[9:].any())
    release()


def shared_with_the_output_travels_whole() -> None:
    model = net()
    out = nn.Linear(WIDTH, NUMBER, bias=False)
    out.weight = model[0].weight
    tied = nn.Sequential(model[0], out)
    dt.distribute(tied, torch.optim.SGD(tied.parameters(), lr=0.1), plan="ddp,wire=int8")
    assert not [member for member in here().loop.members if isinstance(member.sync, Rows)]
    release()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    for one in ("int2",) if "forget" in sys.argv else ("bf16", "fp16", "int8", "int4", "int2", "sign"):
        as_written_out(one, forget="forget" in sys.argv)
    not_finite_reaches_all()
    shared_with_the_output_travels_whole()
    if dt.rank() == 0:
        print("used rows as written out")
