"""Rounds in which all replicas meet: what `local` and `diloco` share.

Where replicas keep what they last agreed on (the anchor), only what they moved since then travels. `drift=d`: the
period is doubled or halved so that replicas are between d/2 and d apart in a round, relative to the size of the
parameters. `delay`: a round travels beside the next steps (`sync/underway.py`). `rows=used`: rows of tables
count by how often replicas use them (`sync/used.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.sync import Trained, require_like
from distributedtorch.core.wire import SlabSum, Wire, sums
from distributedtorch.sync.loose import Loose, Meet, agreed, pieces, power, wide
from distributedtorch.sync.underway import UNDER_WAY, UnderWay
from distributedtorch.sync.used import UsedRows
from distributedtorch.wire.plain import Plain

LONGEST = 1 << 20
"""Steps that a period has at most."""


class Rounds(Loose):
    """Replicas that all meet in rounds."""

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        wire: Wire,
        meet: Meet,
        *,
        period: int,
        drift: float | None,
        anchored: bool,
        delay: int = 0,
        used: UsedRows | None = None,
    ) -> None:
        super().__init__(trained, comm, wire, period)
        self.meet, self.most_drift, self.delay, self.used = meet, drift, delay, used
        self.anchor = [wide(param.detach()).clone() for param in self.params] if anchored or delay or used else []
        """What replicas last agreed on, where only changes of it travel."""
        self.under_way: UnderWay | None = None
        """A round that was begun and has not ended."""
        self.parts: dict[int, Tensor] = {}
        """By table, what this replica's movement of rows counts for in the present round."""

    @property
    def differ(self) -> bool:
        return super().differ or self.under_way is not None

    @property
    def backlog(self) -> int | None:
        return int(self.under_way is not None) if self.delay else None

    def outer(self, index: int) -> list[Tensor]:
        """What is kept of a parameter beside each replica's: its anchor, and what moves that."""
        return [self.anchor[index]]

    @abstractmethod
    def follow(self, moved: Tensor, *outer: Tensor) -> None:
        """Move the anchor of a parameter, or of a piece of it, which replicas have moved by so much on average."""

    def pace(self) -> float:
        """Seconds that a step takes here, where that matters."""
        return 0.0

    def update(self, step: Callable[[], Any]) -> Any:
        if self.used is not None:
            self.used.note()  # before it: optimizers may add decay to gradients, or clear them
        result = step()
        self.taken += 1
        if self.under_way is not None:
            if self.taken >= min(self.delay, self.period):
                self._end_round(self.under_way)
            else:
                self.under_way.bring_on()
        if self.taken >= self.period:
            self._round()
        return result

    def settle(self) -> None:
        for _ in range(2):  # what is under way, and then what replicas have moved since it was begun
            if self.under_way is not None:
                self._end_round(self.under_way)
            if self.taken:
                self._round()

    def agree(self) -> None:
        numbers = self.meet(self.name, [self.pace(), float(self.refilled)])
        if any(row[1] for row in numbers):
            return self.begin_anew()
        pace = max(row[0] for row in numbers)
        if self.used is not None:
            self.parts = self.used.parts()
            self.used.alike.fill_(False)
        if self.delay:
            slabs = enumerate(self.slabs)
            begun = [SlabSum(self.comm, self.wire, f"{self.name}/{k}", slab, self._give) for k, slab in slabs]
            self.under_way = UnderWay([param.detach().clone() for param in self.params], pace, begun)
            return None
        apart, size = self._move() if self.anchor else self.average(self.wire)
        rows = self.meet(f"{self.name}/drift", [apart, size])
        return self._measure(rows, pace)

    def _measure(self, rows: list[list[float]], seconds_per_step: float) -> None:
        """Know how far replicas were apart, and when they meet next."""
        self.drift = (sum(row[0] for row in rows) / len(rows) / max(rows[0][1], 1e-300)) ** 0.5
        self.set_period(seconds_per_step)

    def _give(self, index: int, out: Tensor) -> None:
        """What this replica has moved, from where it began, as its part of the mean."""
        for now, anchor, part in pieces(self.params[index].detach(), self.anchor[index], out):
            torch.sub(wide(now), _began(anchor, now), out=part).div_(self.comm.world)
        if index in self.parts:
            out.mul_(self.parts[index])

    @torch.no_grad()
    def _move(self) -> tuple[float, float]:
        """As `average`, by changes since the last round."""
        apart, size = 0.0, 0.0
        for slab, flat in sums(self.comm, self.wire, self.name, self.slabs, self._give):
            for slot in slab.slots:
                param = self.params[slot.index].detach()
                for now, step, anchor, *more in pieces(param, slot.view(flat), *self.outer(slot.index)):
                    mean = anchor + step
                    apart += power(now - mean)
                    size += power(mean)
                    self.follow(step, anchor, *more)
                    now.copy_(anchor)
        self.average_buffers()
        return apart, size

    @torch.no_grad()
    def _end_round(self, ended: UnderWay) -> None:
        """Go to where replicas have come together, with what this one has moved since the round was begun."""
        moved, apart, size = ended.moved(), 0.0, 0.0
        for values in zip(ended.stood, self.anchor, moved, strict=True):
            for stood, anchor, mean in pieces(*values):
                off = (wide(stood) - _began(anchor, stood)).sub_(mean)
                apart += power(off)
                size += power(torch.add(anchor, mean, out=off))
        rows = self.meet(f"{self.name}/drift", [apart, size, float(self.refilled)])
        self.under_way = None
        if any(row[2] for row in rows):
            ended.end()
            self.begin_anew()
        else:
            for index, param in enumerate(self.params):
                whole = param.detach(), ended.stood[index], moved[index], *self.outer(index)
                for now, stood, step, anchor, *more in pieces(*whole):
                    self.follow(step, anchor, *more)
                    now.copy_((wide(now) - wide(stood)).add_(_began(anchor, now)))
            self.average_buffers()
            ended.end()
            self._measure(rows, ended.seconds_per_step)
        torch.autograd.graph.increment_version(self.params)

    def set_period(self, seconds_per_step: float) -> None:
        """Steps until the next round: the same on all ranks, which have the same numbers."""
        if self.most_drift is None or self.drift is None:
            return
        if self.drift > self.most_drift:
            self.period = max(1, self.period // 2)
        elif self.drift < self.most_drift / 2:
            self.period = min(self.period * 2, LONGEST)

    def begin_anew(self) -> None:
        """Values were put into the parameters of some rank: they are no movement."""
        self.average(Plain(self.comm))
        self.start_here()

    def start_here(self) -> None:
        """Replicas are the same now: what they move is counted from here, and nothing is left out."""
        self.wire.take_state({})
        self.refilled = False
        if self.used is not None:
            self.used.alike.fill_(False)
        for param, anchor in zip(self.params, self.anchor, strict=False):
            anchor.copy_(param.detach())

    def own_state(self) -> dict[str, Tensor]:
        under_way = self.under_way.state() if self.under_way is not None else {}  # first: a wire is done with it then
        anchors = {f"anchor/{index}": value for index, value in enumerate(self.anchor)}
        used = self.used.state() if self.used is not None else {}
        return {**super().own_state(), **anchors, **used, **under_way}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self._let_go()
        super().take_own_state({name: value for name, value in state.items() if not name.startswith(UNDER_WAY)})
        for index, anchor in enumerate(self.anchor):
            name = f"anchor/{index}"
            if name in state:
                anchor.copy_(require_like(name, state[name], anchor))
            else:  # saved where nothing was left out of sums: the next round is a plain one
                self.refilled = True
        if self.used is not None:
            self.used.take_state(state)
        self.under_way = UnderWay.of(state, self.anchor, [param.detach() for param in self.params])

    def consensus(self) -> dict[int, Tensor]:
        found = super().consensus()
        if self.used is not None and self.differ:
            anew = self.comm.exchange(f"{self.name}/anew", torch.tensor(self.refilled))
            for index, part in () if anew.any() else self.used.parts().items():
                found[id(self.params[index])] = self._where_all_would_meet(index, part)
        return found

    @torch.no_grad()
    def _where_all_would_meet(self, index: int, part: Tensor) -> Tensor:
        """A table after a round, without an outer optimizer, where it is no plain mean of replicas. A group call."""
        param, anchor = self.params[index].detach(), self.anchor[index]
        began = wide(self.under_way.stood[index]) if self.under_way else _began(anchor, param)
        since = (wide(param) - began) * part
        mean = agreed(self.comm, f"{self.name}/used/{index}", [("since", since)])[id(since)]
        met = anchor + self.under_way.moved()[index] if self.under_way else anchor
        return (met + mean.to(met.device)).to(param.dtype)

    def _let_go(self) -> None:
        """Forget a round under way: it cannot be called back."""
        if self.under_way is not None:
            self.under_way.end()
            self.under_way = None

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        travels = self.under_way.bytes_held() if self.under_way is not None else 0
        return {**held, "under way": travels} if self.delay else held


def _began(anchor: Tensor, param: Tensor) -> Tensor:
    """Where a replica began, after they last agreed: rounded, where parameters are."""
    return wide(anchor.to(param.dtype))
