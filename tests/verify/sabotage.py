"""A fault put into the library from outside, then the training script: `sabotage.py FAULT train.py [words]`."""

import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import distributedtorch as dt
from distributedtorch import attach
from distributedtorch.core.step import Loop
from distributedtorch.data.partition import Part
from distributedtorch.sync.gradient import Held


def weights_by_rank() -> None:
    """Every rank counts the same, whatever rows it has."""

    def unweighted(self: Loop, member: Any) -> Callable[[torch.Tensor], torch.Tensor | None]:
        return lambda grad: None if member.weight else torch.zeros_like(grad)

    Loop._weigher = unweighted  # type: ignore[method-assign]


def local_clip() -> None:
    """A rank clips its piece of the gradient by the norm of that piece."""
    Held.norm = lambda self, order: self.local.norm(order)  # type: ignore[method-assign]


def repeated_samples() -> None:
    """The last batch is filled up with samples from its start, as torch's DistributedSampler does."""
    original = Part.take

    def take(self: Part, items: Any, number: int = 0) -> Any:
        missing = -len(items) % self.world
        return original(self, [*items, *items[:missing]], number)

    Part.take = take  # type: ignore[method-assign]


def multiplied_scheduler() -> None:
    """The scheduler is stepped once per rank."""
    original: Callable[..., None] = attach.scheduler

    def scheduler(given: Any, world: Any) -> None:
        original(given, world)
        once = given.step
        given.step = types.MethodType(lambda self: [once() for _ in range(dt.world())] and None, given)

    attach.scheduler = scheduler


FAULTS = {f.__name__: f for f in (weights_by_rank, local_clip, repeated_samples, multiplied_scheduler)}

if __name__ == "__main__":
    torch.manual_seed(0)
    _, fault, script, *rest = sys.argv
    FAULTS[fault]()
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
