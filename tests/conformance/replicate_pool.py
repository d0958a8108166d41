"""What each process of a pool runs: replicas that are divided over groups of ranks, each thing against one process.

`-m tests.conformance.replicate_pool FOLDER CHECKS`: faults raise, the last line says what was checked.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch import contents, guard
from distributedtorch.checkpoint import index, place
from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.errors import DesyncError, PlanError
from distributedtorch.core.pull import Pull
from distributedtorch.core.step import Loop, Member
from distributedtorch.core.world import here
from distributedtorch.data.balance import Clock
from distributedtorch.distribute import release
from distributedtorch.sync import divided
from distributedtorch.sync.zero import Zero
from distributedtorch.wire.twofold import Twofold
from tests.checkpoint import reshard_pool
from tests.conformance import cases as c
from tests.conformance import divided_pool, loops_pool, replicate_edges, words_pool
from tests.conformance.loops import rows

ZEROS = ("zero1", "zero2", "zero3")
REPLICAS = {2: (2,), 3: (3,), 4: (2, 4, 1)}
READ = {
    1: ("ddp",),
    2: ("zero1", "zero3,replicate=2"),
    4: ("zero3", "zero1,replicate=2", "zero3,replicate=2", "zero2,replicate=4"),
}
"""Under which plans checkpoints are read in each world."""
LOOPS = (
    "clip_by_other_norms",
    "irregular_windows",
    "gan",
    "frozen_layers",
    "state_loaded_before_and_after",
    "grad_scaler",
    "read_by_one_rank",
    "weights_changed_by_hand",
    "experts_that_not_every_rank_uses",
    "tables_under_adagrad",
)


def plans() -> list[str]:
    return [f"{zero},replicate={count}" for count in REPLICAS[dt.world()] for zero in ZEROS]


def training(optimizer: str, distribute: Callable[..., Any]) -> nn.Module:
    """SGD shows a wrong factor, which clipping or Adam would hide; Adafactor owns whole parameters."""
    torch.manual_seed(3)
    layers = nn.Linear(8, 24, bias=False), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 3)
    model: nn.Module = nn.Sequential(*layers)
    given = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=0.02),
    }[optimizer]()
    model, given, loader = distribute(model, given, rows(n=25))
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            F.mse_loss(model(x), y).backward()
            if optimizer == "adafactor" and number % 2 == 0:  # windows of several backwards
                continue
            if optimizer == "adamw":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            given.step()
            given.zero_grad()
    return model


def same_everywhere(model: nn.Module) -> None:
    """The weights on all ranks, and what ranks of the same place keep, are the same to the bit."""
    flat = torch.cat([value.detach().double().reshape(-1) for value in model.state_dict().values()])
    everyone = here().comm.exchange("weights", flat)
    assert (everyone == everyone[0]).all(), "replicas differ"
    sync = here().loop.members[0].sync
    assert isinstance(sync, Zero)
    if isinstance(sync.memory, divided.Divided) and isinstance(sync.wire, Twofold):
        own = torch.cat([unit.own.detach() for unit in sync.memory.units])
        assert len(own) < len(flat) or sync.comm.alone
        pieces = sync.wire.across.exchange("pieces", own)
        assert (pieces == pieces[0]).all(), "pieces of replicas differ"


def equal(_: Path, every: int = 3) -> None:
    kinds = ("sgd", "adamw", "adafactor")
    truths = {kind: dict(training(kind, lambda *objects: objects).state_dict()) for kind in kinds}
    for number, plan in enumerate(plans() if every == 3 else plans()[:3]):
        for kind in (kinds[number % 3 :] + kinds[: number % 3])[: every if number < 3 else 1]:
            model = training(kind, partial(dt.distribute, plan=plan))
            same_everywhere(model)
            gap, where = c.difference(truths[kind], dict(model.state_dict()))
            assert gap <= 1e-9, f"{plan} with {kind}: {where} differs by {gap:.1e}"
            release()


def alike(folder: Path) -> None:
    """As `equal`, with one optimizer under each plan."""
    equal(folder, every=1)


def filled(_: Path) -> None:
    """A model on the meta device, filled a module at a time."""
    model = divided_pool.initialised()
    truth = divided_pool.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    given = divided_pool.built("meta")
    assert divided_pool.gap(truth, divided_pool.train(*dt.distribute(*given, plan="zero3,replicate=2"))) <= 1e-9
    release()


def loops(folder: Path) -> None:
    """Each under one of the plans; `loops_pool` runs any of them under any."""
    for number, plan in enumerate(plans()[:3]):
        loops_pool.main(folder / "loops.jsonl", [f"plans={plan}", *LOOPS[number::3]])


def words(folder: Path) -> None:
    """What else is in the plan, beside the same in one process, which writes it down first."""
    Clock._now = lambda self: words_pool.Watch.now  # type: ignore[method-assign]
    for text in (words_pool.BALANCED, "accumulate=2,clip=0.05"):
        if dt.world() == 1:
            save_file(dict(words_pool.train(text).state_dict()), folder / f"told {text}")
            release()
            continue
        truth = load_file(folder / f"told {text}")
        for plan in plans()[:3]:
            gap, where = c.difference(truth, dict(words_pool.train(f"{plan},{text}").state_dict()))
            assert gap <= 1e-9, f"{plan},{text}: {where} differs by {gap:.1e}"
            release()


def precise(_: Path) -> None:
    """In bfloat16 and float16 as without replicas, but for the order of sums."""
    torch.set_default_dtype(torch.float32)
    for word in ("bf16", "fp16,clip=0.5"):
        found = []
        for plan in ("ddp", *plans()[:3]):
            torch.manual_seed(1)
            model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = dt.distribute(model, optimizer, plan=f"{plan},{word}", batches="own")
            steps(model, optimizer, 4)
            found.append(dict(model.state_dict()))
            release()
        assert all(c.difference(found[0], other)[0] <= 1e-5 for other in found[1:]), word
    torch.set_default_dtype(torch.float64)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    width = 8
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(100 * number + dt.rank())
        x = torch.randn(4, width, generator=draw, dtype=torch.get_default_dtype())
        F.mse_loss(model(x), x[:, :3]).backward()
        optimizer.step()
        optimizer.zero_grad()


def built(plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model, optimizer = dt.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan=plan, batches="own")
    return model, optimizer


def costs(_: Path) -> None:
    """What a rank holds and sends, in bytes, beside the formulas."""
    for plan in plans()[:3]:
        model, optimizer = built(plan)
        steps(model, optimizer, 2)
        sync = here().loop.members[0].sync
        assert isinstance(sync, Zero)
        size, copies = sync.comm.world, dt.world() // sync.comm.world
        total = 8 * sum(slab.numel for slab in sync.slabs)  # with what fills the last places
        before, held = dt.stats().bytes_sent, dt.stats().bytes_held
        steps(model, optimizer, 1, first=2)
        sent = {kind: count - before.get(kind, 0) for kind, count in dt.stats().bytes_sent.items()}
        real = 8 * sum(p.numel() for p in model.parameters())
        assert held["parameters"] == (total // size if plan.startswith("zero3") else real), (plan, held)
        assert held["gradients"] == (total if plan.startswith("zero1") else total // size), (plan, held)
        assert abs(held["optimizer"] - 2 * total / size) <= 2 * (total - real) + 1000, (plan, held)
        assert sent["reduce-scatter"] == total - total // size, (plan, sent)
        assert abs(sent["all-reduce"] - 2 * total / size * (copies - 1) / copies) <= 8 * 16 * len(sync.slabs), sent
        if not plan.startswith("zero3"):
            assert sent["all-gather"] == total // size * (size - 1), (plan, sent)
        release()


def saved(folder: Path) -> None:
    """Written once, by all ranks."""
    torch.set_default_dtype(torch.float32)
    for kind, plan in zip(("picture", "words", "picture"), plans()[:3], strict=True):
        reshard_pool.save(folder, kind, plan)
        there = place.of(folder / f"{kind}-{plan}-{dt.world()}")
        found = index.read(there, there.committed()[0])
        for key, entry in found.tensors.items():
            assert sum(part.stop - part.start for part in entry.parts) == entry.numel, key
        files = {part.file for entry in found.tensors.values() for part in entry.parts}
        assert {f"state-{rank:05d}.safetensors" for rank in range(dt.world())} <= files
    reshard_pool.save(folder, "picture", "zero2")
    torch.set_default_dtype(torch.float64)


def read(folder: Path) -> None:
    """Everything that was saved so far, in this world and others, to the bit."""
    torch.set_default_dtype(torch.float32)
    for name in sorted(file.stem for file in folder.glob("*.safetensors")):
        for plan in READ[dt.world()]:
            wrong = reshard_pool.load(folder, name, plan)
            assert not wrong, f"{name} under {plan}: {wrong}"
    torch.set_default_dtype(torch.float64)


def resumed(folder: Path) -> None:
    for plan in plans()[:3]:
        model, optimizer = built(plan)
        steps(model, optimizer, 3)
        dt.save(folder / f"resumed {plan}")
        steps(model, optimizer, 3, first=3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        release()
        model, optimizer = built(plan)
        dt.load(folder / f"resumed {plan}")
        steps(model, optimizer, 3, first=3)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), plan
        release()


def refused(_: Path) -> None:
    count, said = {2: (4, "replicas 4 needs a multiple of 4: start 4"), 3: (2, "a multiple of 2: start 2 or 4")}[
        dt.world()
    ]
    for plan, why in (
        *((f"{zero},replicate={count}", said) for zero in ZEROS),
        (f"ddp,replicate={dt.world()}", "ranks that own flat ranges"),
        (f"zero1,replicate={dt.world()},wire=int8", "sums over all ranks at once"),
        (f"zero1,replicate={dt.world()},share", "a range of its own for each rank"),
    ):
        with pytest.raises(PlanError, match=why):
            built(plan)


def named(_: Path) -> None:
    """A change that one replica made and the other did not; after it the ranks are not in step."""
    model, optimizer = built("zero3,replicate=2")
    if dt.rank() in (2, 3):
        with torch.no_grad():
            model[2].bias.add_(1.0)  # type: ignore[index,union-attr,operator]
    with pytest.raises(DesyncError, match=r"some ranks only \(rank 0 0 times, rank 2 1\)"):
        optimizer.step()


def killed(_: Path) -> None:
    """The last rank ends in the middle of the loop."""
    model, optimizer = built(plans()[1])
    steps(model, optimizer, 2)
    if dt.rank() == dt.world() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model, optimizer, 1000)


# Broken builds that the checks must catch.


def no_sum_across(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Twofold, name: str, flat: Tensor, *given: Any) -> Pending:
        return self.inside.reduce_scatter(name, flat, given[0], given[2])

    patch.setattr(Twofold, "reduce_scatter", wrong)


def norm_of_every_replica(patch: pytest.MonkeyPatch) -> None:
    exchange = Comm.exchange

    def wrong(self: Comm, name: str, mine: Tensor) -> Tensor:
        return exchange(self, name, mine) * (self.whole.world // self.world if "norms/" in name else 1)

    patch.setattr(Comm, "exchange", wrong)


def mean_over_one_replica(patch: pytest.MonkeyPatch) -> None:
    touch = Loop._touch

    def wrong(self: Loop, member: Member) -> None:
        touch(self, member)
        member.sync.scale *= self.comm.world / member.sync.comm.world  # type: ignore[attr-defined]

    patch.setattr(Loop, "_touch", wrong)


def saved_by_every_replica(patch: pytest.MonkeyPatch) -> None:
    for module in (contents, divided):
        patch.setattr(module, "share", lambda low, high, copy: (low, high))


def saved_by_one_replica(patch: pytest.MonkeyPatch) -> None:
    def wrong(low: int, high: int, copy: tuple[int, int]) -> tuple[int, int]:
        return (low, low) if copy[0] else (low, low + (high - low) // copy[1])

    for module in (contents, divided):
        patch.setattr(module, "share", wrong)


def fences_of_one_replica(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Pull, name: str) -> list[list[int]]:
        found: list[list[int]] = here().parts(2)[0].exchange(name, torch.tensor(self.editions)).tolist()
        return found

    patch.setattr(Pull, "fence", wrong)


BROKEN = (
    (no_sum_across, alike, "replicas differ"),
    (norm_of_every_replica, alike, "zero2,replicate=2 with adamw: .* differs by"),
    (mean_over_one_replica, alike, "differs by"),
    (saved_by_every_replica, resumed, "parts of"),
    (saved_by_one_replica, resumed, "parts of|elements"),
    (fences_of_one_replica, named, "DID NOT RAISE"),
)


def broken(folder: Path) -> None:
    """Each build is wrong in one thing, and a check says so on every rank."""
    for break_it, check, said in BROKEN:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guard, "_one_replica", lambda world: None)  # it would say so first
            break_it(patch)
            with pytest.raises((AssertionError, dt.CheckpointError, pytest.fail.Exception), match=said):
                check(folder)
        if check is not named:  # after it the ranks are not in step
            release()


CHECKS: dict[str, Callable[[Path], None]] = replicate_edges.CHECKS | {
    f.__name__: f
    for f in (equal, alike, filled, loops, words, precise, costs, saved, read, resumed, refused, named, killed, broken)
}


def main(folder: Path, given: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in given:
        CHECKS[word](folder)
    dt.print("replicas are as one process: " + ", ".join(given))


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), sys.argv[2:])
