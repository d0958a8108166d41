"""Gossip: each replica averages its parameters with one other at a time; nobody waits for all.

Boyd et al., "Randomized Gossip Algorithms", IEEE Trans. Information Theory 2006; Lian et al., "Can Decentralized
Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.

Each rank holds: parameters Psi, gradients Psi, optimizer state K Psi.
Travels per round and rank: Psi, to one other rank. `pairs=ring`: neighbours on a ring, to the right and to the left in
turn; `pairs=random`: drawn anew in each round, alike on all ranks. With an odd number of ranks one sits out.
Use it when a rank that is slow for a moment must not hold all others. Replicas never agree entirely: `dt.sync()` makes
them the same, before an evaluation or at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, explain
from distributedtorch.core.sync import Trained
from distributedtorch.sync.loose import Loose, Meet, power
from distributedtorch.wire.plain import Plain


class Gossip(Loose):
    """Replicas that average in pairs."""

    meets = False

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        meet: Meet,
        *,
        every: int = 1,
        pairs: Literal["ring", "random"] = "ring",
    ) -> None:
        super().__init__(trained, comm, Plain(comm), every)
        self.meet, self.pairs, self.settled = meet, pairs, True

    @property
    def differ(self) -> bool:
        return not self.settled

    def update(self, step: Callable[[], Any]) -> Any:
        self.settled = False
        return super().update(step)

    @torch.no_grad()
    def agree(self) -> None:
        peer = partner(self.comm.rank, self.comm.world, self.rounds, self.pairs)
        if peer is None:
            return
        theirs = int(self.comm.swap(f"{self.name}/steps", torch.tensor(self.taken), peer, self.rounds))
        if theirs != self.taken:
            given = f"in round {self.rounds} rank {peer} has taken {theirs} steps since the last, this one {self.taken}"
            do = "look for a rank that skips batches or calls dt.sync() alone"
            raise DesyncError(explain(given, "as many steps on every rank", do))
        apart, size = 0.0, 0.0
        for number, slab in enumerate(self.slabs):
            flat = torch.zeros(slab.numel, dtype=slab.dtype, device=slab.device)
            for slot in slab.slots:
                slot.view(flat).copy_(self.params[slot.index].detach())
            half = (self.comm.swap(f"{self.name}/{number}", flat, peer, self.rounds) - flat).div_(2)
            apart += power(half)
            size += power(flat)
            flat.add_(half)
            for slot in slab.slots:
                self.params[slot.index].detach().copy_(slot.view(flat))
        self.drift = (apart / max(size, 1e-300)) ** 0.5

    def settle(self) -> None:
        """Gossip alone never ends in agreement: take the mean of all."""
        self.settled = True
        self.meet(f"{self.name}/settle", [])
        self.average(self.wire)
        torch.autograd.graph.increment_version(self.params)


def partner(rank: int, world: int, number: int, pairs: str) -> int | None:
    """Who averages with a rank in a round; None: it sits out."""
    if pairs == "random":
        order = torch.randperm(world, generator=torch.Generator().manual_seed(number)).tolist()
    else:
        order = [(k + number % 2) % world for k in range(world)]
    place = order.index(rank) ^ 1
    return order[place] if place < world else None
