"""What this process has distributed so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distributedtorch.core.plan import Plan
from distributedtorch.data.balance import Balance
from distributedtorch.data.loader import Loader
from distributedtorch.data.stream import Stream
from distributedtorch.pace import Pace


@dataclass
class Run:
    """What this process has distributed so far."""

    plan: Plan | None = None
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    unclaimed: list[dict[str, Any]] = field(default_factory=list)
    """Positions that were loaded for loaders not met yet."""
    feed: Any = None
    """The `feed.Feed` of this run; that module knows this one."""
    fed: int = 0
    """Which loader the last batch to train on came from."""
    pace: Pace = field(default_factory=Pace)
    """How many batches of that one a step takes."""
    stream: Stream | None = None
    seed: int | None = None
    """Torch's when `stream` was made; None where the script has set one since."""
    balance: Balance | None = None
    """What keeps the division of rows, under a plan with `balance`."""
    restore: list[Callable[[], None]] = field(default_factory=list)
    """What undoes the changes made to torch's own classes."""


RUN = Run()
