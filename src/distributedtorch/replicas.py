"""What a checkpoint holds of each rank alone: replicas that differ, gradients under way, what wires have left out.

A run goes on with it under the plan that it was saved under, where it fits. In a world of the same size each rank takes
its own; in another one all take of rank 0's what is the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distributedtorch.checkpoint.index import Reader
from distributedtorch.core.errors import CheckpointError, PlanError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.sync import Sync
from distributedtorch.core.world import here
from distributedtorch.looks import difference, looks
from distributedtorch.run import RUN

BUCKET_BYTES = "DISTRIBUTEDTORCH_BUCKET_BYTES"
_CHANGED = "; parameters and optimizers are loaded already: start again"
_BY_BUCKETS = ("wire/", "sent/", "summed/", "left/", "second/")
"""With what names begin of what wires keep."""


def take_over(reader: Reader, keys: Mapping[int, str]) -> None:
    """Let every sync go on with what was saved for it. A group call where something is divided.

    `keys`: by the id of a parameter its name in checkpoints.

    Raises:
        CheckpointError: What was saved for this rank does not fit; nothing was taken over.
    """
    content = reader.index.content
    try:
        plan = Plan.parse(content["plan"])
    except PlanError:  # imported
        return
    if RUN.plan is None or not plan.same_exchange(RUN.plan):
        return
    own = here().size == content["world"]
    parts = [_Part(reader, number, member.sync, own=own) for number, member in enumerate(here().loop.members)]
    for number, part in enumerate(parts):
        part.check_order(number, content["run"], keys)
    for part in parts:
        part.check()
    for part in parts:
        part.take()


class _Part:
    """What was saved of one rank for one sync."""

    def __init__(self, reader: Reader, number: int, sync: Sync, *, own: bool) -> None:
        self.reader, self.sync, self.own = reader, sync, own
        self.prefix = f"rank.{here().rank if own else 0}/sync.{number}/"
        names = [key.removeprefix(self.prefix) for key in reader.index.tensors if key.startswith(self.prefix)]
        self.names = sorted(name for name in names if own or name.startswith(sync.common))

    def check(self) -> None:
        """Refuse what does not fit; what is there at times only is compared where it is used."""
        if not self.names:
            return
        self._check_buckets()
        have = {name: looks(value) for name, value in self.sync.own_state().items() if self._is_meant(name)}
        entries = self.reader.index.tensors
        saved = {name: looks(entries[self.prefix + name]) for name in self.names if self._is_meant(name)}
        lines = difference(have, saved) if have else []
        if lines:
            given = f"what the checkpoint holds for rank {here().rank} alone ({self.prefix}) is not of this run:\n"
            do = (
                "build model and optimizer as when saved, or load under another plan: it takes the mean of replicas"
                + _CHANGED
            )
            raise CheckpointError(explain(given + "\n".join(lines), "the same names, shapes and types", do))

    def check_order(self, number: int, run: Mapping[str, Any], keys: Mapping[int, str]) -> None:
        """Refuse what was saved by the numbers of parameters in another order than theirs here."""
        if not self.names:
            return
        mine = [keys[id(param)] for param in self.sync.params]
        if "syncs" in run:
            saved = run["syncs"][number]
        else:  # of a version that had the order of the optimizer's groups, reversed
            groups = [group["params"] for one in run["optimizers"] for group in one.get("groups", [])]
            saved = [name for names in groups for name in names if name in mine][::-1] or mine
        if saved != mine:
            given = "what the checkpoint holds for each rank alone counts parameters in another order than here"
            do = "build the model as when saved, or load under another plan: it takes the mean of replicas" + _CHANGED
            raise CheckpointError(explain(given, "one order", do))

    def _check_buckets(self) -> None:
        """What wires have left out is by buckets: in others it would be added elsewhere, or lost."""
        mine = os.environ.get(BUCKET_BYTES)
        saved = self.reader.index.content.get("bucket bytes", mine)
        if saved != mine and any(name.startswith(_BY_BUCKETS) for name in self.names):
            given = f"what wires left out was saved with {BUCKET_BYTES} {'not set' if saved is None else f'= {saved}'}"
            do = "set it as it was, or load under another plan: nothing is then left out" + _CHANGED
            raise CheckpointError(explain(given, f"as here, {'not set' if mine is None else mine}", do))

    def _is_meant(self, name: str) -> bool:
        return not name.startswith(self.sync.comes_and_goes) and (self.own or name.startswith(self.sync.common))

    def take(self) -> None:
        """Go on with it, if there is any."""
        state: dict[str, Tensor] = {name: self.reader.whole(self.prefix + name) for name in self.names}
        if state:
            (self.sync.take_own_state if self.own else self.sync.take_common_state)(state)
