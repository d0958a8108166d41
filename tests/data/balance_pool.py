"""What each process of a pool runs: training in which rank 0 is slow, against the same loop without the library.

`balance_pool.py FOLDER [tampered]`: faults raise, the last line says that all was as in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.data.balance import Clock
from distributedtorch.distribute import release
from distributedtorch.run import RUN

BATCH, EPOCHS = 24, 3
SECONDS = (0.002, 0.001, 0.001)
"""For one row, by rank."""


class Watch:
    """A clock that only rows move: what shares come to does not depend on how busy the machine is."""

    now = 0.0


class Slow(nn.Module):
    """A model that takes its time for every row."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        Watch.now += len(x) * self.seconds
        out: Tensor = self.net(x)
        return out


def build(seconds: float, workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(4)
    x = torch.randn(185, 6)  # 8 batches an epoch, the last of 17 rows
    model = Slow(seconds)
    loader = DataLoader(TensorDataset(x, x[:, :2].sin()), BATCH, shuffle=True, num_workers=workers)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def batches(loader: Any, count: int) -> Iterator[Any]:
    """This many of them, over epochs, from where the loader stands."""
    while count:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: Iterator[Any]) -> list[int]:
    """Rows of every batch."""
    rows = []
    for x, y in given:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(len(x))
    return rows


def truth() -> dict[str, Tensor]:
    model, optimizer, loader = build(0.0, 0)
    train(model, optimizer, batches(loader, 8 * EPOCHS))
    return {name: value.clone() for name, value in model.state_dict().items()}


def distributed(plan: str, workers: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    given = build(SECONDS[dt.rank()], workers)
    made: tuple[nn.Module, torch.optim.Optimizer, Any] = dt.distribute(*given, plan=plan)
    return made


def compare(what: str, model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    assert worst <= 1e-9, f"{what}: differs from one process by {worst}"
    release()


def follow_speeds(expected: dict[str, Tensor]) -> None:
    model, optimizer, loader = distributed("ddp,balance")
    rows = train(model, optimizer, batches(loader, 8 * EPOCHS))
    speeds = [1 / seconds for seconds in SECONDS[: dt.world()]]
    shares = dt.stats().shares
    for rank, speed in enumerate(speeds):
        assert abs(shares[rank] - speed / sum(speeds)) < 0.08, f"shares {shares}"
    assert rows[0] == BATCH // dt.world() and (rows[-2] < rows[0]) == (dt.rank() == 0), rows
    compare("balance", model, expected)


def load_ahead(expected: dict[str, Tensor]) -> None:
    """Rows are divided before workers load them."""
    model, optimizer, loader = distributed("zero2,balance(static)", workers=1)
    rows = train(model, optimizer, batches(loader, 8 * EPOCHS))
    assert (rows[-2] < rows[0]) == (dt.rank() == 0), rows
    compare("workers", model, expected)


def limited(expected: dict[str, Tensor]) -> None:
    os.environ["DISTRIBUTEDTORCH_MAX_ROWS"] = "14" if dt.rank() == 1 else ""
    model, optimizer, loader = distributed("zero1,balance")
    rows = train(model, optimizer, batches(loader, 8 * EPOCHS))
    assert max(rows) == 14 if dt.rank() == 1 else max(rows) == 12, rows
    compare("a limit", model, expected)
    os.environ["DISTRIBUTEDTORCH_MAX_ROWS"] = "11"
    with pytest.raises(dt.UsageError, match=r"a batch of 24 rows for ranks that can take 11 \+ 11"):
        distributed("ddp,balance")
    release()
    del os.environ["DISTRIBUTEDTORCH_MAX_ROWS"]


def resumed(folder: Path, expected: dict[str, Tensor]) -> None:
    """Saved in the middle of an epoch on shares of one run, gone on with on those of another."""
    model, optimizer, loader = distributed("ddp,balance")
    given = batches(loader, 8 * EPOCHS)
    train(model, optimizer, islice(given, 11))
    dt.save(folder / "checkpoints")
    assert dt.stats().shares[0] < 0.45
    release()
    model, optimizer, loader = distributed("ddp,balance")
    dt.load(folder / "checkpoints")
    assert dt.stats().shares[0] == 0.5 and loader.cursor.batch == 3
    rows = train(model, optimizer, batches(loader, 8 * EPOCHS - 11))
    assert (rows[-2] < rows[0]) == (dt.rank() == 0), rows
    compare("resumed", model, expected)


def tampered() -> None:
    """The sabotaged twin: rank 0 goes by other shares."""
    model, optimizer, loader = distributed("ddp,balance")
    train(model, optimizer, batches(loader, 2))
    if dt.rank() == 0:
        assert RUN.balance is not None
        RUN.balance.loaders[0].division.change(0, (0.2, 0.8))  # type: ignore[union-attr]
    train(model, optimizer, batches(loader, 2))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if "tampered" in sys.argv:
        return tampered()
    expected = truth()
    follow_speeds(expected)
    if dt.world() == 2:
        load_ahead(expected)
        limited(expected)
        resumed(folder, expected)
    dt.print("as one process")


if __name__ == "__main__":
    Clock._now = lambda self: Watch.now  # type: ignore[method-assign]
    dt.barrier()
    main(Path(sys.argv[1]))
