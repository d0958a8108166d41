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

import zlib
from typing import Literal

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, explain
from distributedtorch.core.sync import Trained
from distributedtorch.core.wire import Code
from distributedtorch.sync.loose import Loose, Meet, plain


class Gossip(Loose):
    """Replicas that average in pairs."""

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        code: Code | None,
        meet: Meet,
        *,
        every: int = 1,
        pairs: Literal["ring", "random"] = "ring",
    ) -> None:
        super().__init__(trained, comm, plain(comm), every)
        self.code, self.meet, self.pairs = code, meet, pairs

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
            half = self._difference(number, flat, peer).div_(2)
            apart += float(half.double().square().sum())
            size += float(flat.double().square().sum())
            flat.add_(half)
            for slot in slab.slots:
                self.params[slot.index].detach().copy_(slot.view(flat))
        self.drift = (apart / max(size, 1e-300)) ** 0.5

    def _difference(self, number: int, flat: Tensor, peer: int) -> Tensor:
        """How far the other replica is from this one, as both see it: what one gains the other loses."""
        name = f"{self.name}/{number}"
        if self.code is None:
            return self.comm.swap(name, flat, peer, self.rounds) - flat
        key = zlib.crc32(f"{name} {self.rounds}".encode())
        draw = torch.Generator().manual_seed(key * self.comm.world + self.comm.rank)
        mine = self.code.encode(flat, key, draw)
        theirs = self.comm.swap(name, mine, peer, self.rounds)
        here, there = (self.code.decode(code, flat.numel(), flat.dtype, key) for code in (mine, theirs))
        return there - here

    def settle(self) -> None:
        """Gossip alone never ends in agreement: take the mean of all."""
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
