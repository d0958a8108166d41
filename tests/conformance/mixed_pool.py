"""What each process of a pool runs: wires and late gradients with two optimizers, and with parameters of several types.

`-m tests.conformance.mixed_pool [SABOTAGE]`: faults raise. In two processes, so that halves are exact in every type.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.wire import travelling
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.sync.late import Late
from distributedtorch.wire.feedback import Coded
from tests.conformance.loose_pool import compare
from tests.conformance.wires_pool import STEPS, adam, forget, loss_of, net, rows_of, truth

WIRES = ("int8", "int4", "int2", "sign", "topk(0.1)", "randomk(0.1)", "powersgd(rank=1)")
PLANS = (("ddp,wire=topk(0.1)", True, 0), ("delay=1", False, 1), ("delay=1,wire=topk(0.1)", True, 1))


def two(plan: str) -> list[list[Tensor]]:
    """Two models with an optimizer each, one backward through both."""
    models = [net(1), net(2)]
    optimizers = [adam(model) for model in models]
    dt.distribute(*models, *optimizers, plan=plan, batches="own")
    for step in range(STEPS):
        sum(loss_of(model, rows_of(step, dt.rank())) for model in models).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [[param.detach().clone() for param in model.parameters()] for model in models]
    release()
    return found


def late(number: int) -> list[Tensor]:
    """delay=1 by hand: the mean of the ranks' gradients, one step later."""
    model = net(1 + number)
    optimizer, params = adam(model), list(model.parameters())
    flying: Sequence[Tensor] | None = None
    for step in range(STEPS):
        every = [torch.autograd.grad(loss_of(model, rows_of(step, rank)), params) for rank in range(dt.world())]
        for k, param in enumerate(params):
            param.grad = None if flying is None else flying[k]
        optimizer.step()
        flying = [sum(grads) / dt.world() for grads in zip(*every, strict=True)]  # type: ignore[misc]
    return [param.detach() for param in params]


def several() -> None:
    """Two optimizers."""
    for wire in WIRES:
        for number, found in enumerate(two(f"ddp,wire={wire}")):
            compare(f"optimizer {number}, wire={wire}", truth(wire, number=number), found)
    for number, found in enumerate(two("delay=1")):
        compare(f"optimizer {number}, delay=1", late(number), found)


class Mixed(nn.Module):
    """Layers of other types one after the other."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(48, 48).to(dtype) for dtype in dtypes])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()  # type: ignore[union-attr,arg-type]
        return x.double()


def distance(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin()).square().mean()


def largest(values: Tensor) -> Tensor:
    """A tenth of them; who counts among equals, of which there are many in 16 bits, is torch's choice."""
    places = values.abs().topk(max(1, round(0.1 * len(values))), sorted=False).indices
    return torch.zeros_like(values).index_put_((places,), values[places])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def mixed_truth(dtypes: tuple[torch.dtype, ...], wire: bool, delay: int) -> list[Tensor]:
    """ddp with topk, and with gradients applied later, in each parameter's own type."""
    model, world = Mixed(*dtypes), dt.world()
    params = list(model.parameters())[::-1]
    optimizer, left = sgd(model), dict[object, Tensor]()
    like = Coded(here().comm, None)  # type: ignore[arg-type]
    flying: list[list[Tensor]] = []
    for step in range(STEPS):
        every = [torch.autograd.grad(distance(model, rows_of(step, rank)), params) for rank in range(world)]
        new = [sum(grads[k] / world for grads in every) for k in range(len(params))]
        for place, slab in enumerate(travelling(params, like, world) if wire else ()):
            if slab.slots[0].numel >= 1024:
                flats = [torch.zeros(slab.numel, dtype=slab.dtype) for _ in range(world)]
                for flat, grads in zip(flats, every, strict=True):
                    for slot in slab.slots:
                        slot.view(flat).copy_(grads[slot.index] / world)
                total = exchanged(left, place, flats, slab.bounds)
                for slot in slab.slots:
                    new[slot.index] = slot.view(total).clone()
        flying.append(new)  # type: ignore[arg-type]
        for k, param in enumerate(params):
            param.grad = flying[step - delay][k] if step >= delay else None
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def exchanged(left: dict[object, Tensor], place: object, flats: list[Tensor], bounds: Sequence[int]) -> Tensor:
    """Codes to the owner of each range, and a code of the sum back; what is left out is kept."""

    def arrives(which: object, values: Tensor) -> Tensor:
        values = values + left.get(which, torch.zeros_like(values))
        found = largest(values)
        left[which] = values - found
        return found

    total = torch.zeros_like(flats[0])
    for owner in range(len(flats)):
        piece = slice(bounds[owner], bounds[owner + 1])
        total[piece] = flats[owner][piece]
        for rank, flat in enumerate(flats):
            if rank != owner:
                total[piece] += arrives((place, rank, owner), flat[piece])
        total[piece] = arrives((place, owner), total[piece].clone())
    return total


def types() -> None:
    """float32 beside float64, and bfloat16 beside both."""
    for dtypes in ((torch.float32, torch.float64), (torch.bfloat16, torch.float64, torch.float32)):
        for plan, wire, delay in PLANS:
            model = Mixed(*dtypes)
            model, optimizer = dt.distribute(model, sgd(model), plan=plan, batches="own")
            for step in range(STEPS):
                distance(model, rows_of(step, dt.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            for a, b in zip(mixed_truth(dtypes, wire, delay), model.parameters(), strict=True):
                gap = float((a.double() - b.detach().double()).norm() / a.double().norm())
                assert a.dtype == b.dtype and gap <= 1e-6, f"{plan}, {a.dtype}: {gap:.1e} from the one written out"
            release()


def at_once() -> None:
    """Let gradients not be late."""
    late_finish = Late.finish

    def finish(self: Late, used: Sequence[bool]) -> None:
        late_finish(self, used)
        new = self.away
        new.arrivals()
        for index in range(len(self.params)):
            new.show(index)

    Late.finish = finish  # type: ignore[method-assign]


class Turned(nn.Module):
    """Complex numbers, which no code is made for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(48, 48, dtype=torch.complex128) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def complex_numbers() -> None:
    """They travel as they are, under every wire."""
    model = Turned()
    optimizer = sgd(model)
    for step in range(3):
        for rank in range(dt.world()):
            (distance(model, rows_of(step, rank)) / dt.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = torch.view_as_real(model.weight.detach())
    for plan in (
        "wire=bf16",
        "wire=powersgd(rank=1)",
        "zero2,wire=int8",
        "zero3,wire=int8",
        "local(every=1),wire=bf16",
    ):
        model = Turned()
        optimizer = sgd(model)
        dt.distribute(model, optimizer, plan=plan, batches="own")
        for step in range(3):
            distance(model, rows_of(step, dt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare(f"complex numbers, {plan}", [exact], [torch.view_as_real(model.weight.detach().clone())])
        release()


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if "forget" in words:
        forget()
    if "at once" in words:
        at_once()
    several()
    types()
    complex_numbers()
    dt.print("mixed as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1:])
