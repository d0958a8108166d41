"""Late gradients where a loop does not do the plain thing, for `late_pool`: faults raise."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from tests.conformance import encoded_pool

SYNCS = ("ddp", "zero1", "zero2", "zero3")


def made(plan: str, width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = dt.distribute(model, optimizer, plan=plan, batches="own")
    return model, optimizer


def backward(model: nn.Module, number: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(100 * number + dt.rank())
    x = torch.randn(4, 40, generator=draw)
    (model(x).square().mean() * factor).backward()


def gradients_that_were_used_are_refused() -> None:
    for sync in SYNCS:
        model, optimizer = made(f"{sync},delay=1")
        for number, to_none in enumerate((True, True, False)):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        backward(model, 3)  # zeros are nothing to add to
        optimizer.step()
        with pytest.raises(dt.UsageError, match="gradients of the last step are still there"):
            backward(model, 4)
        release()


def let_go_in_the_middle() -> None:
    """Nothing is under way afterwards, wherever the loop stops."""
    shared = here().comm.shared
    for sync in SYNCS:
        for batches in (3, 4):  # of windows of two
            model, optimizer = made(f"{sync},delay=1,accumulate=2", width=200)
            for number in range(batches):
                backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
            assert shared is None or shared.busy
            release()
            assert shared is None or not shared.busy, f"{sync}: exchanges are open after {batches} batches"


def skipped() -> None:
    """Under float16 a gradient that overflows is left out when it would be applied; the one under way is not."""
    torch.set_default_dtype(torch.float32)
    found: dict[str, list[Tensor]] = {}
    for sync in SYNCS:
        model, optimizer = made(f"{sync},delay=1,fp16")
        for number in range(6):
            backward(model, number, float("inf") if number == 2 and dt.rank() == 0 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scale = here().loop.loss_scale
        assert scale is not None and scale.skipped == 1, f"{sync}: {scale and scale.skipped} steps left out"
        found[sync] = [param.detach().clone() for param in model.parameters()]
        release()
    assert all(value.isfinite().all() for value in found["ddp"])
    for sync in SYNCS[1:]:
        gaps = [float((a - b).abs().max()) for a, b in zip(found["ddp"], found[sync], strict=True)]
        assert max(gaps) <= 1e-6, f"{sync},delay=1,fp16 is {max(gaps):.1e} from ddp"
    torch.set_default_dtype(torch.float64)


def coded() -> None:
    """Divided parameters that travel as codes."""
    os.environ["DISTRIBUTEDTORCH_BUCKET_BYTES"] = "8192"
    for wire in ("bf16", "int8"):
        encoded_pool.as_written_out(wire, delay=1)


def main() -> None:
    if dt.world() == 2:
        gradients_that_were_used_are_refused()
        let_go_in_the_middle()
        skipped()
    coded()
