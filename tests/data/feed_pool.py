"""What each process of the tests of feeding runs: loops whose loaders were given or not, and what every rank saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.distribute import release
from tests.conformance.cases import difference

ROWS, BATCH, EPOCHS = 23, 5, 3
Step = Callable[[int], bool]
"""Whether a loop steps after batch i of an epoch."""


class Run:
    """A model, its optimizer and loader, made alike every time; and what was seen."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,)))
        self.model: nn.Module = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        )
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader: Any = self.made()
        self.rows: list[int] = []
        self.evaluated: list[int] = []

    def made(self) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH, shuffle=True)

    def distribute(self, way: str) -> None:
        """Give the loader, or not, or go on with the old one."""
        if way == "given":
            self.model, self.optimizer, self.loader = dt.distribute(self.model, self.optimizer, self.loader)
        else:
            dt.distribute(self.model, self.optimizer, *([self.loader] if way == "old" else []))

    def walk(self, way: str) -> Iterator[Any]:
        if way == "anew":
            self.loader = self.made()
        return iter(self.loader)

    def evaluate(self) -> None:
        """Under no_grad, over the loader that trains."""
        with torch.no_grad():
            self.evaluated += [len(x) for _, x, _ in self.loader]

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def train(way: str, steps: Step, folder: Path | None = None, stop: int = -1, *, counts_on: bool = True) -> Run:
    """Train, from the checkpoint in `folder` if there is one; save there after step `stop` and leave."""
    run = Run()
    run.distribute(way)
    resumed = dt.resume(folder) if folder is not None else None
    taken = 0
    for _ in range(resumed.epoch if resumed else 0, EPOCHS):
        first = resumed.batch if resumed and counts_on else 0
        for number, (_, x, y) in enumerate(run.walk(way), first):
            F.cross_entropy(run.model(x), y).backward()
            run.rows.append(len(x))
            if steps(number):
                run.optimizer.step()
                run.optimizer.zero_grad()
                taken += 1
                if taken == stop:
                    assert folder is not None
                    dt.save(folder)
                    return run
        run.evaluate()
    return run


def by_two(number: int) -> bool:
    """(i + 1) % 2 == 0, and what is left over at the end."""
    return number % 2 == 1 or number == ROWS // BATCH


def from_the_first(number: int) -> bool:
    """i % 2 == 0."""
    return number % 2 == 0


def each(number: int) -> bool:
    return True


def seen(way: str) -> dict[str, Any]:
    run = train(way, each)
    found = {"rows": run.rows, "evaluated": run.evaluated}
    release()
    return found


def uninterrupted(steps: Step) -> dict[str, torch.Tensor]:
    truth = train("given", steps).state()
    release()
    return truth


def resumed(
    way: str, steps: Step, stop: int, folder: Path, truth: dict[str, torch.Tensor], *, counts_on: bool = True
) -> dict[str, Any]:
    """How far a run that was interrupted ends from one that was not."""
    train(way, steps, folder, stop)
    release()
    try:
        gap, where = difference(truth, train(way, steps, folder, counts_on=counts_on).state())
        return {"gap": gap, "where": where}
    except dt.DistributedTorchError as error:
        return {"said": str(error)}
    finally:
        release()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found = {way: seen(way) for way in ("given", "old", "none", "anew")}
    truth = uninterrupted(by_two)
    for way in ("given", "none", "anew"):
        found[f"{way} resumed"] = resumed(way, by_two, 4, folder / way, truth)
    found["end moved"] = resumed("given", by_two, 4, folder / "end", truth, counts_on=False)
    found["start moved"] = resumed("given", from_the_first, 5, folder / "start", truth, counts_on=False)
    found["not moved"] = resumed("given", each, 7, folder / "same", uninterrupted(each), counts_on=False)
    (folder / f"found.{dt.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
