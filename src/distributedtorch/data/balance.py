"""Rows by speed: a rank that computes faster, or has more memory, takes more rows of every batch; all finish together.

The first steps are the probe, on equal rows. After it, and then every 8 steps, each rank tells how many rows a second
it has computed (the median over its steps, less what it waited for others), and all compute the same new shares from
the same numbers: by bounded steps, and only where that gains 3% or more. They hold from a batch on that no rank has
begun to load. `balance(static)` stops after the probe. A rank whose memory holds no more than n rows says so by
DISTRIBUTEDTORCH_MAX_ROWS=n in its environment.

The result is that of one process, as with equal rows: gradients count by their rows. Which samples a batch has and
which batch comes next do not change, so a resumed run goes on where it was, on shares that it measures anew.

What each rank holds: activations of its rows. What travels: 16 bytes from every rank to every other, every 8 steps.
For nodes of different speed, memory or load. Not for batches of a few rows, which whole rows divide badly, and not over
NCCL, where nothing tells computing from waiting. Every rank takes one row at least: without one it would compute a
repeated one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import Any

import torch

from distributedtorch.core import nccl
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.step import Loop, Member
from distributedtorch.data.cursor import Share
from distributedtorch.data.loader import Loader
from distributedtorch.data.partition import written
from distributedtorch.data.shares import MOST_CHANGE, Division, adjusted, equal, rows_of

MAX_ROWS = "DISTRIBUTEDTORCH_MAX_ROWS"
PROBE = 5
"""Steps of the probe; the first of them, which makes memory ready, does not count."""
EVERY = 8
"""Steps between two looks at the speeds."""
_MOST = 64
"""Steps that are remembered, where nobody looks."""


class Clock:
    """How fast this rank computes: from asking for a batch to the end of its step, less the time it waits for others.

    What follows a step until the next batch is asked for (saving, evaluating, printing) has nothing to do with rows.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.seconds: deque[float] = deque(maxlen=_MOST)
        """For one row, in every step since the last look."""
        self._began: float | None = None
        self._ended: float | None = None
        self._rows = 0.0

    def asked(self) -> None:
        """The next batch to train on is asked for."""
        if self._ended is not None:
            if self._began is not None and self._rows:
                self.seconds.append((self._ended - self._began) / self._rows)
            self._began, self._ended, self._rows = None, None, 0.0
        if self._began is None:
            self._began = self._now()

    def arrived(self, rows: float) -> None:
        """It is there. Without rows of its own, this rank computes a repeated one."""
        self._rows += max(rows, 1)

    def stepped(self) -> None:
        """An optimizer has stepped; the last step before the next batch counts."""
        self._ended = self._now()

    def speed(self, leave_out: int) -> float:
        """Rows per second since the last look, without the first steps; 0 where nothing was measured."""
        seconds = list(self.seconds)[leave_out:]
        self.seconds.clear()
        return 1 / max(median(seconds), 1e-9) if seconds else 0.0

    def _now(self) -> float:
        """A time that stands still while the training thread waits for others."""
        return time.monotonic() - sum(traffic.seconds for traffic in list(self.comm.traffic.values()))


class Balance:
    """Measures this rank, and keeps the shares of all in the loaders' divisions."""

    def __init__(self, loop: Loop, *, static: bool, say: Callable[[str], None]) -> None:
        self.loop, self.static, self.say = loop, static, say
        world = loop.comm.world
        self.shares, self.caps = equal(world), (inf,) * world
        self.clock = Clock(loop.comm)
        self.loaders: list[Loader] = []
        self._steps, self._due = 0, PROBE
        self._rows = 0
        """Rows of the largest batch so far."""
        self._probed = self._said = False
        loop.after_step.append(self.stepped)

    def division(self) -> Division:
        """For a loader that is about to be divided."""
        return Division(self.shares, self.caps)

    def add(self, loader: Loader) -> None:
        """Keep the division of a loader, and time what is done with its batches, but for those of an evaluation."""
        before, on_batch, at_end = loader.calls

        def asked() -> None:
            before()
            if torch.is_grad_enabled():
                self.clock.asked()

        def arrived(share: Share, batch: Any) -> None:
            on_batch(share, batch)
            if torch.is_grad_enabled():
                self.clock.arrived(share.rows)
                self._rows = max(self._rows, share.rows_global)

        loader.calls = asked, arrived, at_end
        self.loaders.append(loader)

    def meet(self) -> None:
        """Learn how many rows each rank can take. A group call, after parameters and loaders are attached.

        Raises:
            UsageError: A limit cannot be read, is too small, or speeds cannot be measured here; on all ranks.
        """
        if nccl.is_there() and any(p.is_cuda for member in self.loop.members for p in member.sync.params):
            raise UsageError(_NCCL)
        self.caps = _caps(self.loop.comm)
        for loader in self.loaders:
            assert loader.division is not None
            loader.division.caps = self.caps
            rows_of(loader.batch_global or 0, self.shares, self.caps)  # raises where they are too small

    def stepped(self, _: Sequence[Member]) -> None:
        """An optimizer has stepped, on all ranks: now and then, look at the speeds."""
        self.clock.stepped()
        self._steps += 1
        if self._steps == self._due:
            self._due += EVERY
            self._look()

    def close(self) -> None:
        """Measure no more."""
        if self.stepped in self.loop.after_step:
            self.loop.after_step.remove(self.stepped)

    def _look(self) -> None:
        """Tell the others, and change the shares where that gains something: all ranks in the same way."""
        speed = self.clock.speed(leave_out=0 if self._probed else 1)
        said = self.loop.comm.exchange("balance", torch.tensor([speed, self._ahead()], dtype=torch.float64))
        speeds, ahead = said[:, 0].tolist(), int(said[:, 1].max())
        shares = adjusted(self.shares, speeds, self._rows, self.caps, MOST_CHANGE if self._probed else inf)
        self._probed = self._probed or min(speeds) > 0
        if shares != self.shares:
            self._change(shares, ahead)
        if self._probed and self.static:
            self._due = 0  # never again

    def _change(self, shares: tuple[float, ...], ahead: int) -> None:
        self.shares = shares
        for loader in self.loaders:
            assert loader.division is not None
            loader.division.change(loader.cursor.batches + ahead, shares)
        if not self._said:
            self._said = True
            self.say(f"batch {self._rows} = {written(rows_of(self._rows, shares, self.caps))} by measured speed")

    def _ahead(self) -> int:
        """How many batches workers have begun to load that were not handed out yet."""
        known = [(loader.division, loader.cursor) for loader in self.loaders]
        return max([0, *(each.drawn - cursor.batches for each, cursor in known if each is not None)])


def _caps(comm: Comm) -> tuple[float, ...]:
    """The most rows that each rank can take, by its environment. A group call."""
    mine = os.environ.get(MAX_ROWS, "").strip().encode(errors="replace")
    said = [text.decode() for text in comm.bytes_of_all("most rows", mine)]
    for rank, text in enumerate(said):
        if text and not (text.isdecimal() and int(text) > 0):
            given = f"{MAX_ROWS}={text!r} on rank {rank}"
            raise UsageError(explain(given, "a whole number of rows, at least 1", "change it, or unset it"))
    return tuple(float(text) if text else inf for text in said)


_NCCL = explain(
    "`balance` in the plan, with models on GPUs that exchange over NCCL",
    "exchanges that the training thread waits for (gloo, shared memory): only then is waiting told from computing",
    "leave `balance` out of the plan",
)
