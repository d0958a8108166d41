"""A round that travels beside the next steps: what `delay` means to replicas that step alone.

Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging", 2020;
Douillard et al., "Streaming DiLoCo with Overlapping Communication", 2025.

Each rank holds, from a round's beginning to its end: where it stood when it began, Psi, and what travels, Psi.
Travels per round and rank: as without it, with the whole of the next `delay` steps to do so.

A round begins with what replicas have moved since the last one began, and they step on. So many steps later the mean of
it is there: each replica goes to where all of them have come together, and takes with it what it has moved in between.
Use it where the exchange is a large part of the steps from one to the next; replicas are that much further apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distributedtorch.core.sync import bytes_of, require_like
from distributedtorch.core.wire import SlabSum

UNDER_WAY = "underway/"
"""With what names begin, in a checkpoint, of a round under way."""


class UnderWay:
    """One round under way: where this replica stood, by parameter, and the sums of what all have moved."""

    def __init__(self, stood: Sequence[Tensor], seconds_per_step: float, sums: Sequence[SlabSum] = ()) -> None:
        self.stood, self.sums = stood, sums
        self.seconds_per_step = seconds_per_step
        """On the slowest rank, when it was begun."""
        self._moved: dict[int, Tensor] = {}

    def bring_on(self) -> None:
        """Let sums that are made in two steps take the second, where the first is done."""
        for one in self.sums:
            if not one.starts():
                break

    def moved(self) -> list[Tensor]:
        """By parameter what replicas have moved on average, once it has come; in memory that is lent."""
        if not self._moved:
            for one in self.sums:
                flat = one.wait()
                self._moved |= {slot.index: slot.view(flat) for slot in one.slab.slots}
        return [self._moved[index] for index in range(len(self.stood))]

    def end(self) -> None:
        """Nothing of it is looked at any more."""
        self.moved()
        for one in self.sums:
            one.give_back()
        self.sums, self._moved = [], {}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        stood = {f"{UNDER_WAY}stood/{index}": value for index, value in enumerate(self.stood)}
        moved = {f"{UNDER_WAY}moved/{index}": value for index, value in enumerate(self.moved())}
        pace = torch.tensor(self.seconds_per_step, dtype=torch.float64)
        return {**stood, **moved, f"{UNDER_WAY}pace": pace}

    @classmethod
    def of(cls, state: Mapping[str, Tensor], anchor: Sequence[Tensor], params: Sequence[Tensor]) -> UnderWay | None:
        """Go on from what `state` gave; None where no round was under way."""
        if f"{UNDER_WAY}pace" not in state:
            return None

        def taken(what: str, likes: Sequence[Tensor]) -> list[Tensor]:
            names = [f"{UNDER_WAY}{what}/{index}" for index in range(len(likes))]
            pairs = zip(names, likes, strict=True)
            return [require_like(name, state[name], like).to(like.device, copy=True) for name, like in pairs]

        made = cls(taken("stood", params), float(state[f"{UNDER_WAY}pace"]))
        made._moved = dict(enumerate(taken("moved", anchor)))
        return made

    def bytes_held(self) -> int:
        """What it takes beside parameters and anchors."""
        return sum(map(bytes_of, [*self.stood, *([one.flat for one in self.sums] or self._moved.values())]))
