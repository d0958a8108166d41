"""What exchanges between parts of the ranks must stand, for `replicate_pool`: faults raise."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.core import pairs, segment
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.elastic import watch
from distributedtorch.launch import start
from distributedtorch.sync.memory import checksum
from distributedtorch.wire.twice import Twice
from distributedtorch.wire.twofold import Twofold

_MANY = 1 << 14
"""Numbers of 8 bytes that are not sent in one small message."""


def slow(folder: Path) -> None:
    """The watch leaves a group alone that takes long, while the others wait for it in another exchange, and says so."""
    comm, inside = here().comm, here().parts(2)[0]
    whereabouts = watch._whereabouts

    def told(beat: watch._Beat | None, answers: bool) -> str:
        if beat is not None and beat.exchange == "slow gather":
            (folder / "told").touch()
        return whereabouts(beat, answers)

    with pytest.MonkeyPatch.context() as patch:  # time runs ten times as fast for the watch
        for name in ("BETWEEN_BEATS", "TO_SUSPECT", "TO_REPORT"):
            patch.setattr(watch, f"_SECONDS_{name}", getattr(watch, f"_SECONDS_{name}") / 10)
        patch.setattr(watch, "_SECONDS_TO_REPEAT", 0.5)  # the first report may read a beat from before
        patch.setattr(watch, "_whereabouts", told)
        with comm.held("small", "all"):
            assert start._status(here()).ranks == ()
        if dt.rank() >= 2:
            with inside.held("small", "slow gather"):
                assert start._status(here()).ranks == (2, 3)
                while not (folder / "told").exists():
                    time.sleep(0.01)
                time.sleep(1)  # ten beats, of which three would do for a wrong verdict
        comm.barrier("meeting")


def woken(folder: Path) -> None:
    """Who waits in one group does its part of another group's exchange at once, not when it next looks."""
    comm, (inside, across) = here().comm, here().parts(2)
    flat, cuts = torch.ones(_MANY), [0, _MANY // 2, _MANY]
    comm.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_NAP", segment._Time(20, 0))
        if dt.rank() == 0:
            pending = across.reduce_scatter("woken", flat, cuts)
            inside.exchange("late", torch.zeros(1))
            pending.wait()
        elif dt.rank() == 1:
            while not (folder / "woken").exists():
                time.sleep(0.01)
            inside.exchange("late", torch.zeros(1))
        elif dt.rank() == 2:
            time.sleep(0.2)
            began = time.monotonic()
            across.reduce_scatter("woken", flat, cuts).wait()
            (folder / "woken").touch()
            assert time.monotonic() - began < 10, "a rank that waits in a part sleeps through the others' bells"
        comm.barrier()


def overlapped(_: Path) -> None:
    """A sum across begins when the sum inside is done and the next bucket leaves, not at the end of backward."""
    comm, (inside, across) = here().comm, here().parts(2)
    wire, half, flats = Twofold(inside, across), [0, _MANY // 2, _MANY], [torch.ones(_MANY) for _ in range(2)]
    first = wire.reduce_scatter("first bucket", flats[0], half, (), None)
    assert isinstance(first, Twice)
    comm.barrier()
    first.first.arrived()  # does this rank's part of it
    comm.barrier()
    second = wire.reduce_scatter("second bucket", flats[1], half, (), None)
    assert first.second is not None, "the sum across waits for the end of backward"
    first.wait()
    second.wait()
    mine = slice(half[inside.rank], half[inside.rank + 1])
    assert all((flat[mine] == dt.world()).all() for flat in flats) and not wire.begun
    before = comm.count
    wire.reduce_scatter("of one owner", flats[0], [0, _MANY, _MANY], (), None).wait()
    begun = comm.exchange("begun", torch.tensor([comm.count - before])).view(-1).tolist()
    assert len(set(begun)) == 1, f"the ranks count {begun} exchanges"


def channels(_: Path) -> None:
    """All ranks know exchanges over gloo by the same channels, whichever groups use it; also where names collide."""
    known = here().comm.pairs
    for bits in (19, 8):
        here().comm.barrier()
        known._channels.clear()
        known._names.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairs, "_CHANNEL_BITS", bits)
            weights = _trained("zero2,replicate=2")
        found = sorted(known._channels.items())
        assert bits == 19 or any(channel != zlib.crc32(name.encode()) % (1 << bits) for name, channel in found)
        assert _same(zlib.crc32(repr(found).encode())), "ranks know the same exchanges by different channels"
        assert _same(weights), "replicas differ"
    inside = here().parts(2)[0]
    assert inside.beside is here().comm.hosts
    assert (inside.shared is None) == (dt.rank() in (2, 3))


def _trained(plan: str) -> int:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = dt.distribute(model, optimizer, plan=plan, batches="own")
    for _ in range(2):
        model(torch.full((2, 8), 1.0 + dt.rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    release()
    return checksum(torch.cat([param.detach().view(-1) for param in model.parameters()]))


def _same(number: int) -> bool:
    return len(set(here().comm.exchange("same", torch.tensor([number])).view(-1).tolist())) == 1


CHECKS = {f.__name__: f for f in (slow, woken, overlapped, channels)}
