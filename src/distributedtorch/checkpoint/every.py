"""`save_every`: when the next save is due."""

from __future__ import annotations

import time
from dataclasses import dataclass

from distributedtorch.core.world import here


@dataclass
class Every:
    """Every so many optimizer steps, or so many seconds."""

    request: str
    steps: int | None
    seconds: float | None
    last_step: int
    last_time: float

    def is_due(self) -> bool:
        """Whether it is time, at this step; for seconds only rank 0's clock counts."""
        if self.steps is not None:
            return here().loop.steps - self.last_step >= self.steps
        return time.monotonic() - self.last_time >= (self.seconds or 0.0)

    def began(self) -> None:
        """One begins now."""
        self.last_step, self.last_time = here().loop.steps, time.monotonic()
