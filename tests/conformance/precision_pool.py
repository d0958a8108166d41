"""What each process of a pool runs: training in bf16 and fp16 under every plan, the weights kept by plan text."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from tests.conformance.cases import PLANS
from tests.conformance.loops import rows

OWN = "autocast in the loop"
WORDS = ("bf16", "fp16", "fp16,accumulate=2,clip=0.5", OWN)
PARTS = range(1, 5)
"""In how many backwards one process computes a batch: each part's gradient is rounded by itself, as on ranks."""
OVERFLOW = "fp16 and an overflow"


class Burst(torch.autograd.Function):
    """The identity, with a gradient that is not finite where it is told to be."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, now: bool) -> Tensor:
        ctx.now = now  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (float("inf") if ctx.now else 1.0), None  # type: ignore[attr-defined]


class Exact(nn.Linear):
    """A layer that the user has taken out of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out = super().forward(x.float())
        assert out.dtype == torch.float32
        return out


def train(plan: str, parts: int = 1, burst: bool = False) -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, Exact(8, 3))
    own = torch.autocast("cpu", torch.bfloat16, enabled=OWN in plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = dt.distribute(model, optimizer, rows(), plan=plan.removesuffix(f",{OWN}"))
    number = 0
    for _ in range(3):
        for x, y in data:
            number += 1
            for some, right in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
                if not len(some):
                    continue
                with own:
                    out = model(some)
                assert out.dtype == torch.float32
                if burst:
                    out = Burst.apply(out, number == 4 and dt.rank() == dt.world() - 1)  # type: ignore[no-untyped-call]
                (F.mse_loss(out, right) * (len(some) / len(x))).backward()
            assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return model


class Copying(nn.Linear):
    """A layer that computes with a copy of its weight in bfloat16, as autocast does."""

    copies: list[weakref.ref[Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        self.copies.append(weakref.ref(weight))
        return F.linear(x.to(torch.bfloat16), weight).float() + self.bias


def copies_left(plan: str) -> int:
    """How many copies of weights a forward leaves for its backward."""
    Copying.copies = []
    model = nn.Sequential(*[nn.Sequential(Copying(8, 8), nn.Tanh()) for _ in range(3)])
    model, _ = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    out = model(torch.ones(2, 8))
    left = sum(copy() is not None for copy in Copying.copies)
    out.mean().backward()
    release()
    return left


def keep(model: nn.Module, file: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if dt.is_main():
        save_file(state, file)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if dt.world() > 1:
        assert copies_left("zero2,bf16") > 0
        assert copies_left("zero3,bf16") == 0
    for word in WORDS:
        for plan in PLANS if dt.world() > 1 else PLANS[:1]:
            for parts in PARTS if dt.world() == 1 and plan == "ddp" else PARTS[:1]:
                keep(train(f"{plan},{word}", parts), folder / f"{plan},{word}-{dt.world()}-{parts}.safetensors")
                release()
    for plan in PLANS if dt.world() > 1 else PLANS[:1]:
        keep(train(f"{plan},fp16", burst=True), folder / f"{plan},{OVERFLOW}-{dt.world()}-1.safetensors")
        scale = here().loop.loss_scale
        assert scale is not None and (scale.skipped, scale.value) == (1, 2.0**15), scale and scale.value
        release()


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
