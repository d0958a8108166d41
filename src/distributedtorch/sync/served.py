"""Workers of parameter servers: what pushes of gradients (`server`) and of changes (`updates`) share.

Servers are threads beside the first ranks, or processes of their own (`Reach` says where those are).

A worker's forward begins with a pull where it has none; its step ends with a push, whose answer is the next pull. Where
ranks wait for each other by themselves, servers are told not to wait for them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core import plain
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.override import hooked
from distributedtorch.core.sync import Trained, bytes_of
from distributedtorch.core.wire import Wire
from distributedtorch.serve import rates
from distributedtorch.serve.board import Refused
from distributedtorch.serve.channel import Doors, Kind, Line, keys
from distributedtorch.serve.desk import Desk
from distributedtorch.serve.journal import Journal
from distributedtorch.serve.post import Post, Reduced
from distributedtorch.serve.shard import Shard, copied
from distributedtorch.serve.terms import Terms
from distributedtorch.sync.alone import Alone
from distributedtorch.sync.loose import average, statistics_of, watch_loads
from distributedtorch.sync.portions import divided, items_of, refuse_compensated
from distributedtorch.wire.feedback import Coded

_NUMBERS = itertools.count()
"""The same for the same servers in every start of a job: scripts make them in one order."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Where servers of processes of their own are, for one optimizer."""

    pair: tuple[bytes, bytes]
    """This worker's keys."""
    doors: list[dict[str, Any]]
    """Of each server its address, its public key, the version it begins at, and whether it goes on from earlier."""
    tell: Callable[[str], None]
    """Prints a line where the user looks."""


class Served(Alone):
    """Workers of parameter servers."""

    lockstep = meets = False
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        host: str,
        wire: Wire,
        terms: Terms,
        *,
        kept: Path | None = None,
        reach: Reach | None = None,
    ) -> None:
        super().__init__(trained.params, trained.names, trained.optimizer, comm)
        self.name, self.step, self.terms, self.wire = f"server/{trained.name}", 0, terms, wire
        self.folder = None if kept is None else kept / f"server.{next(_NUMBERS)}"
        self.restored, self.fresh = False, True
        """Whether servers go on from an earlier start of the job, and whether this worker has not pushed yet."""
        self.code = wire.code if isinstance(wire, Coded) else None
        self.items = items_of(trained, wire)
        refuse_compensated(self.names, self.items, terms)
        self.parts = divided(self.params, terms.servers)
        """For each server the numbers of its parameters."""
        self.desk: Desk | None = None
        self.lines = self._meet(host, keys()) if reach is None else self._reached(reach)
        self.posts = [
            Post(line, [self.items[k] for k in part], self._reduced(part))
            for line, part in zip(self.lines, self.parts, strict=True)
        ]
        self.closed = self.differ = self.told = False
        """Whether it has hung up, whether workers may have other parameters now, and whether an evaluation said so."""
        self.refilled = self.restated = False
        """Whether values were put into parameters from outside, and into the optimizer, for servers to take over."""
        self.pulled = self.used = False
        """Whether what was pulled counts as being computed with, and whether it is."""
        if reach is not None and not self.restored:
            self._fill(state=True)
        self.comm.before_waiting.append(self._rest)
        mine = {id(param) for param in self.params}
        self.models = [model for model in trained.models if any(id(p) in mine for p in model.parameters())]
        self.hooks = [hooked(m, m.register_forward_pre_hook(lambda *_: self._begin())) for m in self.models]
        self.hooks += watch_loads(self.models, self.loaded)
        self.versions = [param._version for param in self.params]
        self._prepare()

    def _prepare(self) -> None:
        """Make what one kind of worker has beyond the others."""

    def _meet(self, host: str, pair: tuple[bytes, bytes]) -> list[Line]:
        """Open this rank's server, if it has one, and lines to all."""
        comm, card, terms = self.comm, {"key": pair[0].decode()}, self.terms
        public = [json.loads(one)["key"] for one in comm.bytes_of_all(f"{self.name}/keys", json.dumps(card).encode())]
        door: dict[str, Any] = {}
        if comm.rank < len(self.parts):
            mine = self.parts[comm.rank]
            items = [self.items[k] for k in mine]
            shard = Shard([self.params[k] for k in mine], self.optimizer, items, terms, comm.world)
            doors = Doors(host, pair, {key.encode(): rank for rank, key in enumerate(public)}, shard.largest)
            journal = None if self.folder is None else Journal(self.folder / str(comm.rank))
            self.desk = Desk(shard, doors, staleness=terms.staleness, ahead=terms.ahead, journal=journal)
            door = {"where": f"tcp://{host}:{doors.port}", "version": self.desk.board.version}
            door["restored"] = self.desk.restored
        all_doors = [json.loads(one) for one in comm.bytes_of_all(f"{self.name}/doors", json.dumps(door).encode())]
        self._find(all_doors)
        wheres = [one["where"] for one in all_doors[: len(self.parts)]]
        return [Line(comm.rank, where, pair, public[k].encode(), number=k) for k, where in enumerate(wheres)]

    def _reached(self, reach: Reach) -> list[Line]:
        """Lines to servers of processes of their own."""
        self._find(reach.doors)
        rank, tell = self.comm.rank, reach.tell
        return [
            Line(rank, one["where"], reach.pair, one["key"].encode(), number=number, tell=tell)
            for number, one in enumerate(reach.doors)
        ]

    def _find(self, doors: Sequence[Mapping[str, Any]]) -> None:
        self.restored = any(one.get("restored") for one in doors)
        self.found = [one["version"] for one in doors if one] if self.restored else []
        """The version at which each server goes on from an earlier start of the job."""

    def owner(self, server: int) -> int:
        """The rank that speaks for the state of a server's parameters: beside it, or one of the workers."""
        return server % self.comm.world

    def _fill(self, *, state: bool) -> None:
        """Give servers of processes of their own what the user's model has and, if so, optimizer; options: rank 0's.

        A worker's optimizer has no state but what was loaded: without a load it would undo the servers'.
        """
        mine = plain.pack(rates.plain(self.optimizer) if state and self.comm.rank == 0 else None)
        options = plain.unpack(self.comm.bytes_of_all(f"{self.name}/options", mine)[0])
        for server, (post, part) in enumerate(zip(self.posts, self.parts, strict=True)):
            if self.owner(server) == self.comm.rank:
                params = [self.params[number] for number in part]
                states = [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in params]
                given = {"values": [param.detach() for param in params], "options": options, "states": None}
                told = {**given, "states": states} if state and self.terms.push == "gradients" else given
                self.comm.count_sent("fill", post.fill(told))
        self.comm.barrier(f"{self.name}/filled")

    def _publish(self) -> None:
        """Show the user's optimizer the state that servers have, each owner its part."""
        if self.desk is not None:
            with self.desk.lock:
                self.desk.shard.publish()
        for server, (post, part) in enumerate(zip(self.posts, self.parts, strict=True)):
            if self.terms.apart and self.terms.push == "gradients" and self.owner(server) == self.comm.rank:
                for number, state in zip(part, post.whole()["states"], strict=True):
                    if state:
                        self.optimizer.state[self.params[number]] = copied(state, self.params[number].device)

    def _reduced(self, part: Sequence[int]) -> Reduced | None:
        """Codes of what is pushed to one server, and of what earlier ones left out."""
        wire = self.wire
        if not isinstance(wire, Coded):
            return None
        return lambda number, values, key, draw: wire.reduced(f"push/{part[number]}", values, key, draw)

    @property
    def backlog(self) -> int | None:
        """Pushes that wait at this rank's server; apart, at all servers when they answered last."""
        if self.terms.apart:
            return sum(line.waiting for line in self.lines)
        return None if self.desk is None else len(self.desk.board.waiting)

    # A worker's step.

    def _begin(self) -> None:
        """A model runs: with what the servers have now, where that was given back."""
        if torch.is_grad_enabled():
            self._take_over()
            if not self.pulled:
                self._pull()
            self.used = True

    def _pull(self, *, whole: bool = False) -> None:
        with self.comm.timed("pull"):  # others may be anywhere
            for post in self.posts:
                post.held = -1 if whole else post.held
                post.ask()
            self._take()

    def _push(self, values: Sequence[Tensor | None]) -> None:
        self.step += 1
        self.pulled = self.fresh = False
        self.differ = not self.terms.rounds
        options = rates.numbers(self.optimizer) if self.terms.told else None
        for post, part in zip(self.posts, self.parts, strict=True):
            self.comm.count_sent("push", post.bring(self.step, [values[number] for number in part], options))
        with self.comm.timed("push"):
            self._take()

    def places(self) -> list[Tensor]:
        """Where what is pulled goes."""
        return [param.detach() for param in self.params]

    @torch.no_grad()
    def _take(self) -> None:
        """Take over what the servers answer."""
        said, places = "", self.places()
        for post, part in zip(self.posts, self.parts, strict=True):
            try:
                self.comm.count_sent("pull", post.take([places[number] for number in part]))
                self.step = max(self.step, post.step)  # after a new start of the job: where this worker was
            except Refused as error:
                said = said or str(error)
        if said:
            do = "look at the server's rank; what it had applied before is kept"
            raise UsageError(explain(f"rank {self.comm.rank}: refused by the server: {said}", "an answer", do))
        self.pulled, self.used = True, False
        self.landed()
        torch.autograd.graph.increment_version(self.params)
        self.versions = [param._version for param in self.params]

    def landed(self) -> None:
        """What was pulled is in its places."""
        return

    def _rest(self) -> None:
        """This rank waits for others by itself: servers are not to wait for it."""
        if self.used and self.terms.staleness:
            raise UsageError(_BETWEEN)
        if self.pulled and not self.used:
            self.pulled = False
            for line in self.lines:
                line.say(Kind.LEAVE)

    # All ranks together.

    def settle(self) -> None:
        """Give every rank the servers' parameters. A group call."""
        self.meet(state=False)

    def meet(self, *, state: bool) -> None:
        """Give every rank the servers' parameters and, if asked for, owners the servers' state. A group call."""
        self.used = False
        self._take_over()
        self.comm.barrier(f"{self.name}/settle")
        self._pull(whole=self.code is not None)
        if state or not self.terms.apart:
            self._publish()
        average(self.comm, f"{self.name}/buffers", statistics_of(self.models))
        self.comm.barrier(f"{self.name}/settled")
        self.differ = False

    def loaded(self) -> None:
        if self.restored and self.fresh:  # after a new start of the job the servers have what came later
            self.pulled = False
            for post in self.posts:
                post.held = -1
            return
        self.refilled = True
        self.wire.take_state({})  # what was left out is of other values

    def _take_over(self) -> None:
        """Let the servers have what was put into the user's objects, on all ranks. A group call, if so."""
        if self.refilled:
            self.refilled = self.used = False
            self.comm.barrier(f"{self.name}/load")
            if self.terms.apart:
                self._fill(state=self.restated)
            elif self.desk is not None:
                self.desk.refill(state=self.restated)
            self.restated = False
            for post in self.posts:
                post.held = -1
            self.comm.barrier(f"{self.name}/loaded")

    def own_state(self) -> dict[str, Tensor]:
        own = {f"wire/{name}": value for name, value in self.wire.state().items()}
        if self.terms.rates == "own":
            own["options"] = torch.tensor(rates.numbers(self.optimizer), dtype=torch.float64)
        return own

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        left = {k.removeprefix("wire/"): v for k, v in state.items() if k.startswith("wire/")}
        self.wire.take_state({} if self.restored and self.fresh else left)  # pushed already, before the new start
        if "options" in state:
            rates.put(self.optimizer, state["options"].tolist())

    def bytes_held(self) -> dict[str, int]:
        return {**super().bytes_held(), "left out": sum(map(bytes_of, self.wire.state().values()))}

    def close(self) -> None:
        """Tell the servers that this worker is done; a rank with a server waits until all are."""
        if self.closed:
            return
        self.closed = True
        self.comm.before_waiting.remove(self._rest)
        for remove in self.hooks:
            remove()
        for line in self.lines:
            line.say(Kind.BYE)
        for line in self.lines:
            line.part()
        if self.desk is not None:
            self.desk.close()
        for line in self.lines:
            line.close()


_BETWEEN = explain(
    "ranks wait for each other between a forward and its optimizer step (dt.mean, dt.weight, a barrier), under a "
    "server with a bound: others may wait for this one's push meanwhile",
    "such calls after optimizer.step()",
    "move the call, or use staleness=0 or no bound",
)


def not_finite(rank: int, what: str) -> str:
    """Why something is not pushed."""
    given = f"rank {rank}: {what} has NaN or infinite numbers, and was not pushed"
    do = "look at the loss on this rank (clip=, a smaller learning rate); the others go on with what they have"
    return explain(given, "finite numbers", do)
