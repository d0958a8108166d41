"""How a plan's sync is made of parts: the only file that knows them all.

What each word means and costs is in `menu`; a word of kind sync is built when it is in both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from distributedtorch.core.blocks import block_of_each, blocks_in, small_ones_together
from distributedtorch.core.bucket import bucket_bytes, lay_out
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.core.shared import EACH_ITS_OWN
from distributedtorch.core.sync import Sync, Trained
from distributedtorch.core.wire import TURN, Code, Wire, travelling
from distributedtorch.core.world import BEFORE_LEAVING, World
from distributedtorch.launch.address import own_address
from distributedtorch.launch.ranks import KEPT_VARIABLE
from distributedtorch.report import say
from distributedtorch.serve.terms import Terms
from distributedtorch.sync import encoded
from distributedtorch.sync.alone import Alone
from distributedtorch.sync.ddp import Ddp
from distributedtorch.sync.diloco import Diloco
from distributedtorch.sync.divided import Divided, Unit
from distributedtorch.sync.gossip import Gossip
from distributedtorch.sync.groups import Groups
from distributedtorch.sync.late import Late
from distributedtorch.sync.local import Local
from distributedtorch.sync.loose import Loose
from distributedtorch.sync.memory import Memory, Replicated, Shown
from distributedtorch.sync.once import OncePerHost
from distributedtorch.sync.optimizers import owns_whole
from distributedtorch.sync.post import PostLocal
from distributedtorch.sync.server import Server
from distributedtorch.sync.sparse import tables
from distributedtorch.sync.updates import Updates
from distributedtorch.sync.used import UsedRows
from distributedtorch.sync.watched import watch
from distributedtorch.sync.zero import Zero
from distributedtorch.wire.cast import Bf16, Fp16
from distributedtorch.wire.feedback import Coded
from distributedtorch.wire.hosts import between_hosts
from distributedtorch.wire.plain import Plain
from distributedtorch.wire.powersgd import PowerSgd
from distributedtorch.wire.quantize import Int2, Int4, Int8, Sign
from distributedtorch.wire.sparsify import RandomK, TopK
from distributedtorch.wire.twofold import Twofold

Build = Callable[[Trained, Plan, World], Sync]
_SMALL = 1 << 20
"""Blocks are gathered together up to so many bytes: each gather costs about as long as moving that much."""


def _ddp(trained: Trained, plan: Plan, world: World) -> Sync:
    made, one = wire(plan, world), trained

    def make(name: str) -> Ddp:
        return Ddp(one.params, one.names, one.optimizer, world.comm, name, wire=made)

    return Late([make(one.name), make(one.name + TURN)]) if plan.delay else make(one.name)


def _zero(stage: int) -> Build:
    def build(trained: Trained, plan: Plan, world: World) -> Sync:
        params, names, name, whole = trained.params, trained.names, trained.name, owns_whole(trained.optimizer)
        memory: Memory
        comm, way = _divided_over(plan, world)
        if stage == 3:
            memory = divide(params, names, trained.models, world, comm, whole=whole, block=trained.block, way=way)
        elif isinstance(way, Coded):
            memory = Shown(params, names, travelling(params, way, world.size, whole=whole), way, name)
        else:
            kind = OncePerHost if trained.share and world.comm.unshared != EACH_ITS_OWN else Replicated
            memory = kind(params, names, lay_out(params, comm.world, whole=whole), comm, name)
            if isinstance(memory, OncePerHost):
                world.undo.append(memory.close)

        def make(name: str) -> Zero:
            return Zero(params, names, trained.optimizer, name, memory, wire=way, eager=stage > 1, whole=whole)

        return Late([make(name), make(name + TURN)]) if plan.delay else make(name)

    return build


def _divided_over(plan: Plan, world: World) -> tuple[Comm, Wire]:
    """The ranks that divide a replica between them, and how gradients are summed over all."""
    if plan.replicas == 1:
        return world.comm, wire(plan, world)
    inside, across = world.parts(plan.replicas)
    return inside, Twofold(inside, across)


def divide(
    params: list[nn.Parameter],
    names: list[str],
    models: list[nn.Module],
    world: World,
    comm: Comm,
    *,
    whole: bool,
    block: str | None,
    way: Wire,
) -> Divided:
    """Divide parameters over the ranks of `comm` and watch their use; `block`: the class gathered at once."""
    blocks = blocks_in(models, block)
    limit = min(_SMALL, bucket_bytes(sum(p.numel() * p.element_size() for p in params)))
    where = small_ones_together(block_of_each(params, blocks), params, limit)
    slabs = travelling(params, way, comm.world, whole=whole, blocks=where)
    groups: dict[int, list[int]] = {}
    for number, slab in enumerate(slabs):
        groups.setdefault(where[slab.slots[0].index], []).append(number)
    groups.pop(-1, None)
    make = encoded.by(way.code) if isinstance(way, Coded) else Unit
    memory = Divided(params, names, slabs, groups.values(), world.pull(), comm=comm, make=make)
    world.undo.append(watch(memory, models, blocks))
    return memory


def divide_frozen(
    params: list[nn.Parameter], names: list[str], models: list[nn.Module], plan: Plan, world: World
) -> None:
    """Divide parameters that nothing trains."""
    comm, way = _divided_over(plan, world)
    divide(params, names, models, world, comm, whole=False, block=plan.block, way=way)


def keep_once(params: list[nn.Parameter], names: list[str], world: World) -> None:
    """Keep parameters that nothing trains once per host."""
    if world.comm.unshared != EACH_ITS_OWN:
        memory = OncePerHost(params, names, lay_out(params, world.size, whole=False), world.comm, f"frozen/{names[0]}")
        world.undo.append(memory.close)


def _rounds(kind: Callable[..., Loose]) -> Build:
    def build(trained: Trained, plan: Plan, world: World) -> Sync:
        options: dict[str, Any] = {**plan.options(plan.sync), "delay": plan.delay}
        if options.pop("rows", "all") == "used":
            used = UsedRows(trained, world.comm)
            for name in used.tied:
                say(world, f"rows=used leaves {name} as it is: an nn.Linear has it too, every step uses all its rows")
            if used.counts:
                options["used"] = used
            elif trained.names and not used.tied:
                say(world, f"rows=used changes nothing: no embedding is trained with {trained.names[-1]}")
        made = kind(trained, world.comm, wire(plan, world), world.loop.meet, **options)
        world.undo.append(made.close)
        return made

    return build


def _local(trained: Trained, plan: Plan, world: World) -> Sync:
    rows = tables(trained.models) if plan.begins_in_lockstep else set()
    if any(id(param) in rows for param in trained.params):
        do = "sparse=False, or leave `after` out"
        raise UsageError(explain(f"sparse gradients under {plan}", "a plan that exchanges no gradients of tables", do))
    return _rounds(PostLocal if "after" in plan.options("local") else Local)(trained, plan, world)


def _gossip(trained: Trained, plan: Plan, world: World) -> Sync:
    made = Gossip(trained, world.comm, world.loop.meet, **plan.options("gossip"))  # type: ignore[arg-type]
    world.undo.append(made.close)
    return made


def _groups(trained: Trained, plan: Plan, world: World) -> Sync:
    return Groups(trained, world.comm, wire(plan, world), **plan.options("groups"))  # type: ignore[arg-type]


def _server(trained: Trained, plan: Plan, world: World) -> Sync:
    said = terms(plan)
    kind = Updates if said.push == "updates" else Server
    reach = world.reach.pop(0) if world.reach else None
    host = "" if reach else listening(world)
    made = kind(trained, world.comm, host, wire(plan, world), said, kept=kept(), reach=reach)
    if made.found:
        say(world, _restored(made.found))
    world.undo.append(made.close)
    BEFORE_LEAVING.append(made.close)
    return made


def terms(plan: Plan) -> Terms:
    """What a plan says of its servers."""
    return Terms(**plan.options("server"))  # type: ignore[arg-type]


def listening(world: World) -> str:
    """The address at which a server of this host listens: loopback where all processes are on one host."""
    return "127.0.0.1" if world.local_size == world.size else own_address(os.environ["MASTER_ADDR"])


def kept() -> Path | None:
    """Where servers keep what they have applied; None where the job is not started again."""
    folder = os.environ.get(KEPT_VARIABLE)
    return Path(folder) if folder else None


def _restored(versions: list[int]) -> str:
    at = " and ".join(map(str, versions))
    text = f"servers go on from version {at}; what is loaded before the first step does not replace that"
    return text + ("; a push under way had reached only some of them" if len(set(versions)) > 1 else "")


def sync(trained: Trained, plan: Plan, world: World) -> Sync:
    """The sync that a plan means here."""
    if world.size == 1 and not world.reach:
        return Alone(trained.params, trained.names, trained.optimizer, world.comm)
    return SYNCS[plan.sync](trained, plan, world)


SYNCS: dict[str, Build] = {
    "ddp": _ddp,
    **{f"zero{k}": _zero(k) for k in (1, 2, 3)},
    "local": _local,
    "diloco": _rounds(Diloco),
    "gossip": _gossip,
    "server": _server,
    "groups": _groups,
}
"""Sync word -> what makes it."""

CODES: dict[str, Callable[..., Code]] = {
    "bf16": Bf16,
    "fp16": Fp16,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "sign": Sign,
    "topk": TopK,
    "randomk": RandomK,
}
"""Wire word -> the code it means; `powersgd` is none, it works on whole matrices."""
_BY_NUMBER = ("bf16", "fp16", "int8", "int4", "int2", "sign")
"""Codes that have something of every number."""


def wire_of_tables(plan: Plan, world: World) -> Coded | None:
    """How rows of tables travel where those that no rank used need not; None: all of them do, with the rest."""
    plainly = plan.sync == "ddp" and plan.accumulate == 1 and not plan.delay and world.size > 1
    if not plainly or plan.wire is None or plan.wire.name not in _BY_NUMBER:
        return None
    return Coded(world.comm, CODES[plan.wire.name]())


def wire(plan: Plan, world: World) -> Wire:
    """How sums travel under a plan."""
    options = plan.options("wire")
    if plan.wire is None:
        return Plain(world.comm)
    if plan.wire.name == "powersgd":
        return PowerSgd(world.comm, **options)  # type: ignore[arg-type]
    across = options.pop("across", None)
    code = CODES[plan.wire.name](**options)
    return between_hosts(world.comm, code) if across else Coded(world.comm, code)
