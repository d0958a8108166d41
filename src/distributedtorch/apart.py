"""Servers in processes of their own: who serves, and what it does until the workers are done.

All processes run the script up to `dt.distribute`, so that those which serve have the model's shapes and the optimizer
from the script itself. There all meet once: they compare what they were given, and exchange addresses and keys made for
this job. Then the workers go on as a world of their own, and the others serve until every worker has said that it is
done; they never come back to the script.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

from distributedtorch import attach, inspect, recipes
from distributedtorch.core import segment
from distributedtorch.core.errors import PeerError, UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.sync import Trained
from distributedtorch.core.wire import Wire
from distributedtorch.core.world import World
from distributedtorch.launch import record
from distributedtorch.launch.start import go_on_with
from distributedtorch.run import RUN
from distributedtorch.serve.channel import Doors, keys
from distributedtorch.serve.desk import Desk
from distributedtorch.serve.journal import Journal
from distributedtorch.serve.shard import Shard
from distributedtorch.serve.terms import Terms
from distributedtorch.sync.portions import divided, items_of, refuse_compensated
from distributedtorch.sync.served import Reach


def part(given: inspect.Given, plan: Plan, world: World) -> None:
    """Make the last processes servers, of which none returns, and the others a world. A group call of all processes.

    Raises:
        UsageError: Something was distributed already, or there is nothing to serve.
    """
    if world.size == 1 and not world.servers:
        return
    if not given.optimizers and world.servers:
        return
    _refuse(given, plan, world)
    comm, workers, pair = world.comm, world.size - plan.apart, keys()
    terms, wire = recipes.terms(plan), recipes.wire(plan, world)
    trained = [_trained(given, number) for number in range(len(given.optimizers))]
    for one in trained:
        refuse_compensated(one.names, items_of(one, wire), terms)  # while all are here
    inspect.same_everywhere(given, [], plan, comm)
    card = {"key": pair[0].decode(), "host": segment.host()}
    cards = [json.loads(one) for one in comm.bytes_of_all("served/keys", json.dumps(card).encode())]
    number = comm.rank - workers
    desks: list[Desk | None] = []
    said = "[]"
    if number >= 0:
        record.serves(number)
        known = {one["key"].encode(): rank for rank, one in enumerate(cards[:workers])}
        server = _Server(number=number, host=recipes.listening(world), pair=pair, workers=known)
        desks = [server.open(one, wire, terms) for one in trained]
        said = json.dumps([server.card(desk) for desk in desks])
    doors = [json.loads(one) for one in comm.bytes_of_all("served/doors", said.encode())][workers:]
    near = sum(one["host"] == card["host"] for one in cards[workers:])
    go_on_with(workers, world.local_size - near)
    if number >= 0:
        _serve([desk for desk in desks if desk is not None])
    world.servers = plan.apart
    world.reach = [
        Reach(pair=pair, doors=[one[k] for one in doors if one[k] is not None], tell=record.say)
        for k in range(len(given.optimizers))
    ]


def _trained(given: inspect.Given, number: int) -> Trained:
    optimizer = given.optimizers[number]
    params = attach.trained_by(optimizer, given.models)
    known = {id(param): name for model in given.models for name, param in model.named_parameters()}
    names = [known.get(id(param), "a parameter") for param in params]
    return Trained(params=params, names=names, optimizer=optimizer, models=given.models, name=str(number))


@dataclass(frozen=True, kw_only=True)
class _Server:
    """What all desks of this process share."""

    number: int
    """Which server this is."""
    host: str
    """Where it listens."""
    pair: tuple[bytes, bytes]
    """Its keys."""
    workers: dict[bytes, int]
    """By public key the worker's rank."""

    def open(self, trained: Trained, wire: Wire, terms: Terms) -> Desk | None:
        """Serve this server's part of what one optimizer trains; None where it has none."""
        parts = divided(trained.params, terms.servers)
        if self.number >= len(parts):
            return None
        params = [trained.params[k] for k in parts[self.number]]
        items = [items_of(trained, wire)[k] for k in parts[self.number]]
        shard = Shard(params, trained.optimizer, items, terms, len(self.workers))
        doors = Doors(self.host, self.pair, self.workers, shard.most)
        folder = recipes.kept()
        journal = None if folder is None else Journal(folder / f"server.{trained.name}" / str(self.number))
        bounds = {"staleness": terms.staleness, "ahead": terms.ahead}
        owner = self.number % len(self.workers)
        return Desk(shard, doors, **bounds, journal=journal, owner=owner, on_failure=_failed)

    def card(self, desk: Desk | None) -> dict[str, object] | None:
        """What workers have to know of a desk."""
        if desk is None:
            return None
        where, key = f"tcp://{self.host}:{desk.doors.port}", self.pair[0].decode()
        return {"where": where, "key": key, "version": desk.board.version, "restored": desk.restored}


def _serve(desks: list[Desk]) -> NoReturn:
    """Serve until every worker is done, and end: what the script does after dt.distribute is the workers' to do.

    A signal to end is for the workers, who may still have to save; then this process goes when they are gone.
    """

    def end(number: int, _: object) -> None:
        _told_to_end.append(number)
        for desk in desks:
            desk.doors.ending = True

    code = 1
    try:
        with contextlib.suppress(ValueError):  # handlers are the main thread's
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end)
        for desk in desks:
            desk.close()
        faults = [desk.failed for desk in desks if desk.failed is not None]
        ended = _told_to_end and all(isinstance(fault, PeerError) for fault in faults)
        code = 0 if not faults else 128 + _told_to_end[0] if ended else 1
        atexit._run_exitfuncs()
    except BaseException as error:
        _failed(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


_told_to_end: list[int] = []
"""The signals that have come."""


def _failed(error: BaseException) -> None:
    """Before workers hear of it: so this is the first cause."""
    if _told_to_end and isinstance(error, PeerError):
        return  # the workers have been ended, too
    traceback.print_exception(error)
    record.raised(error)


def _refuse(given: inspect.Given, plan: Plan, world: World) -> None:
    if world.servers:
        done = "a later call of dt.distribute with an optimizer, under servers in processes of their own"
        do = "give all models and optimizers in the first call, or use servers beside ranks (leave apart out)"
        raise UsageError(explain(done, "one call: the servers have taken over what the first one gave", do))
    if RUN.plan is not None or not given.optimizers:
        first = "a second" if RUN.plan is not None else "a"
        said = f"{first} call of dt.distribute{'' if given.optimizers else ' without an optimizer'}, under {plan}"
        do = "give all models and optimizers to the first call of dt.distribute"
        raise UsageError(explain(said, "a first call with the optimizers, for servers to take over", do))
