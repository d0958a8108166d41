"""Rows follow measured speeds: what is timed, when shares change, and that the result stays that of one process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributedtorch.core.batches import Rows
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, UsageError
from distributedtorch.core.step import Loop
from distributedtorch.data import balance as balance_module
from distributedtorch.data.balance import EVERY, PROBE, Balance, Clock
from distributedtorch.data.loader import Loader, divide
from tests import forked

POOL = "tests.data.balance_pool"
ROWS = 48


class Alone:
    """Rank 0 of two: time is what the test says, and rank 1 tells what the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, static: bool = False) -> None:
        self.now, self.other, self.asked = 0.0, (0.0, 0.0), 0
        self.said: list[str] = []
        monkeypatch.setattr(balance_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(balance_module.nccl, "is_there", lambda: False)
        self.loop = Loop(Comm(0, 2))
        monkeypatch.setattr(self.loop.comm, "exchange", self.exchange)
        monkeypatch.setattr(self.loop.comm, "bytes_of_all", lambda name, mine: [mine, b""])
        self.balance = Balance(self.loop, static=static, say=self.said.append)
        self.loader: Loader = divide(
            [torch.zeros(ROWS)] * 100,
            rank=0,
            world=2,
            stream=None,
            on_batch=lambda share, batch: None,
            division=self.balance.division(),
        )
        self.balance.add(self.loader)
        self.walk = iter(self.loader)

    def exchange(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return torch.stack([mine, torch.tensor(self.other, dtype=torch.float64)])

    def step(self, seconds_per_row: float, waited: float = 0.0) -> int:
        """One batch; rows that this rank had of it."""
        rows = len(next(self.walk))
        self.now += seconds_per_row * rows + waited
        self.loop.comm.traffic["small"].seconds += waited
        self.loop.stepped(())
        self.now += 5.0  # an evaluation, say
        return rows


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Alone]:
    return lambda **options: Alone(monkeypatch, **options)


def test_only_computing_is_timed(alone: Callable[..., Alone]) -> None:
    run = alone()
    for waited in (9.0, 0.0, 3.0, 1.0):
        run.step(0.25, waited)
    assert list(run.balance.clock.seconds) == pytest.approx([0.25] * 3)  # the fourth ends when the fifth is asked for


def test_waiting_would_be_timed_without_the_clock_that_stands_still(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone()
    monkeypatch.setattr(Clock, "_now", lambda self: run.now)
    for waited in (9.0, 0.0, 3.0, 1.0):
        run.step(0.25, waited)
    assert max(run.balance.clock.seconds) > 0.3


def test_several_batches_and_steps_are_one_measurement(alone: Callable[..., Alone]) -> None:
    run = alone()
    for _ in range(2):  # two batches per step, as with accumulate
        rows = len(next(run.walk)) + len(next(run.walk))
        run.now += rows * 0.5
        run.loop.stepped(())
        run.now += rows * 0.5  # a second optimizer
        run.loop.stepped(())
        with torch.no_grad():
            next(run.walk)  # an evaluation
        run.now += 7.0
    assert list(run.balance.clock.seconds) == pytest.approx([1.0])


def test_the_probe_decides_at_once_and_later_steps_little_by_little(alone: Callable[..., Alone]) -> None:
    run = alone()
    run.other = (2.0, 0.0)
    rows = [run.step(9.0 if number == 0 else 1.0) for number in range(PROBE + EVERY)]
    assert rows == [ROWS // 2] * PROBE + [ROWS // 3] * EVERY
    assert run.said == ["batch 48 = 16 + 32 by measured speed"]
    run.other = (0.2, 0.0)
    after = [run.step(1.0) for _ in range(3 * EVERY)]
    assert after[EVERY - 1] < after[EVERY] < after[2 * EVERY] and run.balance.shares[0] > 0.6
    assert len(run.said) == 1


def test_measured_once(alone: Callable[..., Alone]) -> None:
    run = alone(static=True)
    run.other = (2.0, 0.0)
    assert [run.step(1.0) for _ in range(40)] == [ROWS // 2] * PROBE + [ROWS // 3] * (40 - PROBE)
    assert run.asked == 1


def test_what_workers_have_begun_stays_as_it_was(alone: Callable[..., Alone]) -> None:
    run = alone()
    run.other = (2.0, 7.0)  # rank 1 has seven batches under way
    assert [run.step(1.0) for _ in range(PROBE + EVERY)] == [ROWS // 2] * (PROBE + 7) + [ROWS // 3]


def test_nothing_changes_before_all_ranks_have_measured(alone: Callable[..., Alone]) -> None:
    run = alone()
    assert {run.step(1.0) for _ in range(PROBE + EVERY)} == {ROWS // 2}
    run.other = (2.0, 0.0)
    assert [run.step(1.0) for _ in range(EVERY + 1)][-1] == ROWS // 3  # the probe is made up for


def test_it_lets_go(alone: Callable[..., Alone]) -> None:
    run = alone()
    run.balance.close()
    run.balance.close()
    for _ in range(PROBE):
        run.step(1.0)
    assert run.asked == 0


@pytest.mark.parametrize(("text", "said"), [("many", "MAX_ROWS='many' on rank 0"), ("0", "at least 1")])
def test_limits_that_cannot_be_read(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("DISTRIBUTEDTORCH_MAX_ROWS", text)
    with pytest.raises(UsageError, match=said):
        alone().balance.meet()


def test_limits_hold_from_the_first_batch(alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTEDTORCH_MAX_ROWS", "10")
    run = alone()
    run.balance.meet()
    run.other = (0.1, 0.0)
    assert {run.step(1.0) for _ in range(PROBE + EVERY)} == {10}


def test_rows_that_do_not_add_up_are_seen() -> None:
    loop = Loop(Comm(0, 2))
    loop.batches.settled = Rows(mine=3, everywhere=6, batch=0)
    loop._every_row([3.0, 3.0])
    with pytest.raises(DesyncError, match=r"3 \+ 2 rows of a batch of 6"):
        loop._every_row([3.0, 2.0])


def pool(world: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(world, *words, cwd=folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 3])
def test_as_one_process_whoever_is_slow(world: int, tmp_path: Path) -> None:
    ended = pool(world, tmp_path, POOL, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "as one process" in ended.stdout


@pytest.mark.timeout(120)
def test_ranks_that_divide_differently_are_named(tmp_path: Path) -> None:
    ended = pool(2, tmp_path, POOL, str(tmp_path), "tampered")
    assert ended.returncode != 0
    assert "rows of a batch of 24" in ended.stderr


@pytest.mark.timeout(120)
def test_ranks_that_count_equally_are_seen(tmp_path: Path) -> None:
    ended = pool(2, tmp_path, "tests.conformance.sabotage", "ranks_count_equally", POOL, str(tmp_path))
    assert ended.returncode != 0
    assert "differs from one process" in ended.stderr
