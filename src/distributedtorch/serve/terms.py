"""What a plan's `server(...)` says, as the workers and the servers of a run have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How pushes are made and applied."""

    staleness: int | None = None
    """Versions that what a push was computed from may be old; 0: rounds; None: no bound."""
    ahead: int | None = None
    """Steps that a worker may be ahead of the slowest; None: any."""
    where: Literal["beside", "apart"] = "beside"
    """Whether servers are threads beside the first ranks, or the last processes of the job."""
    servers: int = 1
    """How many there are."""
    compensate: float = 0.0
    """How much of the delay of a gradient is made up for, to first order."""
    rates: Literal["server", "own", "staleness"] = "server"
    """Whose options a push is applied with: those of the server's rank (apart: of rank 0), of the worker's, or the
    server's rank's with the learning rate divided by the staleness of the push."""
    push: Literal["gradients", "updates"] = "gradients"
    """What a worker pushes: gradients, or what its own optimizer has changed."""
    every: int = 1
    """Steps from push to push, where changes are pushed."""

    @property
    def apart(self) -> bool:
        """Whether servers have processes of their own."""
        return self.where == "apart"

    @property
    def told(self) -> bool:
        """Whether the numbers among a worker's options travel with its pushes."""
        return self.push == "gradients" and (self.apart or self.rates == "own")

    @property
    def rounds(self) -> bool:
        """Whether the pushes of all workers are applied together."""
        return self.staleness == 0

    @property
    def bounded(self) -> bool:
        """Whether a worker may have to wait for another one's push outside of rounds."""
        return not self.rounds and (self.staleness is not None or self.ahead is not None)
