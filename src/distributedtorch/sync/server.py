"""Parameter servers: workers push gradients and pull parameters; the user's optimizer runs on the servers.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Zheng et al., "Asynchronous
Stochastic Gradient Descent with Delay Compensation", ICML 2017 (`compensate`).

Each worker holds: parameters Psi, gradients Psi. Servers hold together: parameters Psi, optimizer state K Psi, and one
more Psi per version on its way. By default one server beside rank 0; `servers=n`: beside ranks 0 to n-1, which divide
whole parameters between them by size.
Travels per step and worker: Psi to the servers and Psi back.
`staleness=s`: a push is computed from parameters that are at most s versions old, others wait; s=0 is the round in
which all pushes are averaged, the result of ddp. `ahead=s`: a worker more than s steps ahead of the slowest waits.
Without either, nobody waits. `clip` acts on each worker's gradient, BatchNorm on each worker's rows.
Under `dtorch run --restarts` servers keep what they have applied in the run folder: when a rank is killed and all are
started again, no push that was answered is lost and none counts twice, whatever checkpoint the workers go on from.
Use it when ranks differ in speed from step to step; where all are alike, ddp is faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Kept, Trained
from distributedtorch.serve.board import Refused
from distributedtorch.serve.channel import Doors, Kind, Line, keys
from distributedtorch.serve.desk import Desk
from distributedtorch.serve.journal import Journal
from distributedtorch.serve.shard import Layout, Shard
from distributedtorch.sync.alone import Alone
from distributedtorch.sync.gradient import Held
from distributedtorch.sync.loose import average, statistics_of, watch_loads
from distributedtorch.sync.state import divide_state, gather_state


class Server(Alone):
    """Workers of parameter servers."""

    lockstep = meets = False
    divided = True
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        trained: Trained,
        comm: Comm,
        host: str,
        *,
        staleness: int | None = None,
        ahead: int | None = None,
        servers: int = 1,
        compensate: float = 0.0,
        kept: Path | None = None,
    ) -> None:
        super().__init__(trained.params, trained.names, trained.optimizer, comm)
        self.name, self.step, self.staleness = f"server/{trained.name}", 0, staleness
        self.restored, self.fresh = False, True
        """Whether servers go on from an earlier start of the job, and whether this worker has not pushed yet."""
        self.parts = divided(self.params, servers)
        """For each server the numbers of its parameters."""
        self.layouts = [Layout([self.params[k] for k in part]) for part in self.parts]
        self.desk: Desk | None = None
        pair = keys()
        self.held = [self._held(index) for index in range(len(self.params))]
        self.take_state()
        self.lines = self._meet(host, pair, ahead, compensate, kept)
        self.closed = False
        self.refilled = False
        """Whether values were put into parameters or optimizer from outside, for the servers to take over."""
        self.pulled = self.used = False
        """Whether what was pulled counts as being computed with, and whether it is."""
        self.comm.before_waiting.append(self._rest)
        mine = {id(param) for param in self.params}
        self.models = [model for model in trained.models if any(id(p) in mine for p in model.parameters())]
        self.hooks = [model.register_forward_pre_hook(lambda *_: self._begin()) for model in self.models]
        self.hooks += watch_loads(self.models, self.loaded)
        self.versions = [param._version for param in self.params]

    def _meet(
        self, host: str, pair: tuple[bytes, bytes], ahead: int | None, compensate: float, kept: Path | None
    ) -> list[Line]:
        """Open this rank's server, if it has one, and lines to all."""
        comm, card = self.comm, {"key": pair[0].decode()}
        public = [json.loads(one)["key"] for one in comm.bytes_of_all(f"{self.name}/keys", json.dumps(card).encode())]
        door: dict[str, Any] = {}
        if comm.rank < len(self.parts):
            mine = [self.params[k] for k in self.parts[comm.rank]]
            shard = Shard(mine, self.optimizer, compensate)
            doors = Doors(host, pair, {key.encode(): rank for rank, key in enumerate(public)}, shard.layout.bytes)
            journal = None if kept is None else Journal(kept / self.name.replace("/", ".") / str(comm.rank))
            self.desk = Desk(shard, doors, staleness=self.staleness, ahead=ahead, journal=journal)
            door = {"where": f"tcp://{host}:{doors.port}", "restored": self.desk.restored}
        all_doors = [json.loads(one) for one in comm.bytes_of_all(f"{self.name}/doors", json.dumps(door).encode())]
        self.restored = any(one.get("restored") for one in all_doors)
        return [Line(comm.rank, all_doors[k]["where"], pair, public[k].encode()) for k in range(len(self.parts))]

    def _held(self, index: int) -> Held:
        """Who has the optimizer's state of a parameter."""
        param, world = self.params[index], self.comm.world
        owner = next(k for k, part in enumerate(self.parts) if index in part)
        slot = Slot(index=index, start=0, numel=param.numel(), shape=param.shape, stride=tuple(param.stride()))
        bounds = [0] * (owner + 1) + [param.numel()] * (world - owner)
        return Held(slot, param.detach().new_empty(0), bounds, self.comm, self.names[index])

    @property
    def backlog(self) -> int | None:
        """Pushes that wait at this rank's server."""
        return None if self.desk is None else len(self.desk.board.waiting)

    # A worker's step.

    def _begin(self) -> None:
        """A model runs: with what the servers have now, where that was given back."""
        if torch.is_grad_enabled():
            self._take_over()
            if not self.pulled:
                self._pull()
            self.used = True

    def _pull(self) -> None:
        with self.comm.timed("pull"):  # others may be anywhere
            for line in self.lines:
                line.say(Kind.PULL)
            self._take()

    @torch.no_grad()
    def _take(self) -> None:
        """Take over what the servers answer."""
        said = ""
        for line, part, layout in zip(self.lines, self.parts, self.layouts, strict=True):
            try:
                message = line.hear()
            except Refused as error:
                said = said or str(error)
                continue
            assert message.content is not None
            self.step = max(self.step, message.step)  # after a new start of the job: where this worker was
            self.comm.count_sent("pull", layout.bytes)
            for number, values in zip(part, layout.views(message.content), strict=True):
                self.params[number].detach().copy_(values)
        if said:
            do = "look at the server's rank; what it had applied before is kept"
            raise UsageError(explain(f"rank {self.comm.rank}: refused by the server: {said}", "an answer", do))
        self.pulled, self.used = True, False
        torch.autograd.graph.increment_version(self.params)
        self.versions = [param._version for param in self.params]

    def update(self, step: Callable[[], Any]) -> Any:
        grads = [param.grad for param in self.params]
        dense = [None if grad is None else grad.to_dense() if grad.is_sparse else grad for grad in grads]
        for name, grad in zip(self.names, dense, strict=True):
            if grad is not None and not bool(torch.isfinite(grad).all()):
                raise UsageError(_not_finite(self.comm.rank, name))
        for name, param, version in zip(self.names, self.params, self.versions, strict=True):
            if param._version != version:
                raise UsageError(_edited(name))
        self.step += 1
        self.pulled = self.fresh = False
        for line, part, layout in zip(self.lines, self.parts, self.layouts, strict=True):
            message = layout.pack([dense[number] for number in part])
            self.comm.count_sent("push", message.numel())
            line.say(Kind.PUSH, self.step, message)
        with self.comm.timed("push"):
            self._take()

    def _rest(self) -> None:
        """This rank waits for others by itself: servers are not to wait for it."""
        if self.used and self.staleness:
            raise UsageError(_BETWEEN)
        if self.pulled and not self.used:
            self.pulled = False
            for line in self.lines:
                line.say(Kind.LEAVE)

    # All ranks together.

    def settle(self) -> None:
        """Give every rank the servers' parameters, and each server's rank its state. A group call."""
        self.used = False
        self._take_over()
        self.comm.barrier(f"{self.name}/settle")
        self._pull()
        if self.desk is not None:
            with self.desk.lock:
                self.desk.shard.publish()
        average(self.comm, f"{self.name}/buffers", statistics_of(self.models))
        self.comm.barrier(f"{self.name}/settled")

    def loaded(self) -> None:
        if not (self.restored and self.fresh):  # after a new start of the job the servers have what came later
            self.refilled = True
        else:
            self.pulled = False

    def _take_over(self) -> None:
        """Let the servers have what was put into the user's objects, on all ranks. A group call, if so."""
        if self.refilled:
            self.refilled = self.used = False
            self.comm.barrier(f"{self.name}/load")
            if self.desk is not None:
                self.desk.refill()
            self.comm.barrier(f"{self.name}/loaded")

    def consensus(self) -> dict[int, torch.Tensor]:
        self.settle()
        return {}

    def keeps(self, index: int) -> Kept:
        low, high = self.held[index].bounds[self.comm.rank : self.comm.rank + 2]
        return Kept(low=low, high=high, stride=tuple(self.params[index].stride()), shape=None)

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        self.settle()
        return gather_state(self.optimizer, self.params, self.held, self.comm, whole=True)

    def take_state(self) -> None:
        divide_state(self.optimizer, self.params, self.held, whole=True)
        self.loaded()

    def close(self) -> None:
        """Tell the servers that this worker is done; a rank with a server waits until all are."""
        if self.closed:
            return
        self.closed = True
        self.comm.before_waiting.remove(self._rest)
        for hook in self.hooks:
            hook.remove()
        for line in self.lines:
            line.say(Kind.BYE)
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


def _edited(name: str) -> str:
    given = f"parameter {name!r} was changed in place since it was pulled; the server's values would replace it"
    do = "edit parameters before dt.distribute, or load them with load_state_dict on all ranks"
    return explain(given, "parameters that only the servers change", do)


def _not_finite(rank: int, name: str) -> str:
    given = f"rank {rank}: the gradient of {name!r} has NaN or infinite numbers, and was not pushed"
    do = "look at the loss on this rank (clip=, a smaller learning rate); the others go on with what they have"
    return explain(given, "finite gradients", do)


def divided(params: list[nn.Parameter], servers: int) -> list[list[int]]:
    """Numbers of parameters for each server: the largest first, to the one that has least."""
    parts: list[list[int]] = [[] for _ in range(min(servers, max(1, len(params))))]
    loads = [0] * len(parts)
    for index in sorted(range(len(params)), key=lambda k: (-params[k].numel(), k)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += params[index].numel() * params[index].element_size()
    return [sorted(part) for part in parts]
