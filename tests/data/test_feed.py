"""What feeds a loop: loaders that were not given are divided, evaluations are not, a resumed loop counts on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import distributedtorch as dt
from distributedtorch.core.batches import Rows
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError
from distributedtorch.core.proof import Drawn, proof_of
from distributedtorch.core.step import Loop
from distributedtorch.data.cursor import Cursor
from distributedtorch.data.survey import fingerprint
from distributedtorch.pace import Pace
from tests import forked
from tests.data.data_ranks import Numbers

SIZES = {2: ([3, 3, 3, 3, 2], [2, 2, 2, 2, 1]), 3: ([2, 2, 2, 2, 1],) * 2 + ([1, 1, 1, 1, 1],)}
"""Rows of an epoch, by rank."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_what_every_rank_is_given(world: int, tmp_path: Path) -> None:
    ended = forked.run(world, "tests.data.feed_pool", str(tmp_path), cwd=tmp_path, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(world):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        mine = SIZES[world][rank]
        assert found["given"]["rows"] == mine * 3
        for way in ("old", "none", "anew"):
            assert found[way]["rows"] == [5, *mine[1:]] * 3, way
            assert found[way]["evaluated"] == [5, 5, 5, 5, 3] * 3, "whole without gradients"
            assert found.get(f"{way} resumed", {"gap": 0})["gap"] < 1e-9
        assert found["given resumed"]["gap"] < 1e-9 and found["not moved"]["gap"] < 1e-9
        assert "the last 1 of that epoch made no step" in found["end moved"]["said"]
        assert "the first step comes after 1" in found["start moved"]["said"]
        assert "enumerate(loader, resumed.batch)" in found["start moved"]["said"]
    assert ended.stderr.count("(the loader that feeds the loop, after its first batch") == 7
    assert "after batch 2 of its epoch; enumerate(loader, resumed.batch) counts on from there" in ended.stderr


def seen(counts: list[tuple[int, int, bool]], total: int = 5) -> Pace:
    """After these batches: epoch, batch in it, whether a step follows."""
    pace = Pace()
    for epoch, batch, step in counts:
        cursor = Cursor(epoch=epoch, batch=batch, ended=False)
        if step:
            pace.check(cursor, total)
            pace.stepped(cursor, total)
        if batch == total:
            pace.ended(cursor)
    return pace


@pytest.mark.parametrize(
    ("steps", "length"),
    [
        ((1, 2, 3, 4, 5), 1),
        ((2, 4, 5), 2),
        ((1, 3, 5), 2),
        ((2, 5), 0),
        ((2, 4, 7, 9), 0),
        ((2, 4, 8, 10), 2),
        ((1,), 1),
        ((), 0),
    ],
)
def test_windows_of_one_length_are_known(steps: tuple[int, ...], length: int) -> None:
    total = 11 if max(steps, default=0) > 5 else 6 if steps == (2, 5) else 5
    assert seen([(0, n, n in steps) for n in range(1, total)] + [(0, total, total in steps)], total).length == length


def test_a_resume_that_moves_windows_is_refused() -> None:
    regular, irregular = seen([(0, 2, True), (0, 4, True)]), seen([(0, 2, True), (0, 4, True), (0, 7, True)], 9)
    pace = Pace()
    for saved, batch, told in ((regular, 6, False), (regular, 8, False), (regular, 5, True), (irregular, 5, False)):
        pace.goes_on(saved.state_dict(), Cursor(epoch=0, batch=4), inside=True)
        pace.told = told
        pace.check(Cursor(epoch=0, batch=batch), 9)
    pace.goes_on(regular.state_dict(), Cursor(epoch=0, batch=4), inside=True)
    with pytest.raises(UsageError, match="comes after 1"):
        pace.check(Cursor(epoch=0, batch=5), 9)


def test_a_proof_is_of_the_values() -> None:
    x = torch.randn(3, 4)
    same = [(x, {"y": [1, "a"]}), (x.clone(), {"y": [1, "a"]})]
    other = [(x + 1e-7, {"y": [1, "a"]}), (x, {"y": [2, "a"]}), (x.numpy(), {"y": [1, "b"]})]
    assert proof_of(same[0]) == proof_of(same[1]) >= 0
    assert len({proof_of(value) for value in [same[0], *other]}) == 4
    assert proof_of([object(), x.to("meta"), x[:0]]) == -1
    assert proof_of(x.bfloat16()) != proof_of(x.bool()) >= 0
    assert proof_of(numpy.arange(3)) >= 0


def test_other_batches_are_refused_and_the_same_are_not() -> None:
    loop = Loop(Comm(0, 2))
    for of_loader, said in ((False, "each draws its own"), (True, "would divide them twice")):
        loop._of_loader = of_loader
        loop._same_proof([7.0, 7.0])
        assert loop.alike is not of_loader
        loop._same_proof([7.0, -1.0])
        with pytest.raises(UsageError, match=said):
            loop._same_proof([7.0, 8.0])


def drawn(*calls: Any) -> Drawn:
    """What a step is about whose forwards were given this."""
    model = nn.Linear(4, 4)
    found = Drawn(lambda: False)
    found.watch([nn.Sequential(model)])
    try:
        for given in calls:
            found.stepped() if given is None else model(given)
    finally:
        found.close()
    return found


def test_a_step_is_known_by_what_its_first_forward_was_given() -> None:
    x, noise = torch.randn(2, 4), torch.randn(2, 4)
    assert drawn(x).tell() == proof_of([x])
    assert drawn(noise, x).tell() == -1, "the first step's first forward may be a trial"
    assert drawn(noise, x, None, x, noise).tell() == proof_of([x])
    with torch.no_grad():
        assert drawn(x).tell() == -1
    assert drawn(x, None, x, None, x).over
    assert not torch.nn.modules.module._has_any_global_hook(), "nothing is left"


def test_a_whole_batch_counts_for_the_loop_only_while_it_is_alone() -> None:
    loop = Loop(Comm(0, 2))
    batches = loop.batches
    whole, other, part = Rows(mine=2, everywhere=4), Rows(mine=3, everywhere=6), Rows(mine=3, everywhere=4, source=1)
    offer = batches.offered(whole)
    assert batches.settle(explicit=False) is whole and offer.taken
    two = batches.offered(other)
    assert batches.settle(explicit=False) is whole and not two.taken
    batches.arrived(part, None)
    assert batches.settle(explicit=False) is part
    late = batches.offered(other)
    batches.arrived(part, None)
    assert batches.settle(explicit=False) is part and not late.taken


class Files(Numbers):
    def __init__(self, names: list[Any]) -> None:
        super().__init__(len(names))
        self.names = names


def test_datasets_that_keep_other_samples_are_told_apart() -> None:
    def samples(names: list[Any]) -> Any:
        return fingerprint(torch.utils.data.DataLoader(Files(names), 2), 2)["samples"]

    mine = [f"/scratch/0/{k}.png" for k in range(6)]
    assert samples(mine) == samples([f"/scratch/1/{k}.png" for k in range(6)]), "a host keeps its files elsewhere"
    assert samples(mine) != samples(mine[::-1])
    pairs = [(name, k) for k, name in enumerate(mine)]
    assert samples(pairs) != samples([(name, k + 1) for name, k in pairs])
    assert samples([None] * 6) == samples([object()] * 6)


def test_batches_that_is_neither() -> None:
    with pytest.raises(UsageError, match="None or 'own'"):
        dt.distribute(nn.Linear(2, 2), batches="mine")  # type: ignore[arg-type]
