"""A job whose parameters count what was applied, for kills in mid-run: `counted.py FOLDER PLAN [SABOTAGE]`.

Each rank has one number, and the gradient of its loss takes one off it: with learning rate 1 the number says how often
a push of that rank was applied (in rounds, where the mean is applied, three are taken off). A net is trained beside it;
a version has one sum of bytes, whoever is given it, before and after a kill. A plan with `apart` has one process more,
which comes no further than dt.distribute. Each rank writes `log.<rank>` a line at a time: `push STEP`, `answered STEP
VERSION SUM`, `end STEP COUNT`. It ends at the step that a file `stop` says. `faults` looks at the logs, and knows
nothing of servers.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

WORLD, AHEAD = 3, 30


class Counting(nn.Module):
    """One number per rank, and a net."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each = each
        self.counts = nn.Parameter(torch.zeros(WORLD, dtype=torch.float64))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)).double()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.net(x) - x[:, :3].sin()).square().mean() - self.each * self.counts[rank]


def sabotage(how: str) -> None:
    """Break what is tested."""
    from distributedtorch.serve import journal
    from distributedtorch.serve.journal import Journal, rounds

    if how == "forgets":
        Journal.write = lambda *_: None  # type: ignore[method-assign,assignment]
    elif how == "twice":
        journal.rounds = lambda path: (one for each in rounds(path) for one in (each, each))  # type: ignore[assignment]


def main(folder: Path, plan: str, how: str) -> None:
    """One rank."""
    import distributedtorch as dt
    from distributedtorch.core.world import here
    from distributedtorch.serve import journal
    from distributedtorch.sync.server import Server

    sabotage(how)
    journal._LEAST_BYTES = 1 << 30 if how else 1 << 16  # the state is written anew now and then, or never
    (folder / f"pid.{os.environ['DISTRIBUTEDTORCH_ATTEMPT']}.{os.environ['RANK']}").write_text(str(os.getpid()))
    model = Counting(WORLD if "staleness=0" in plan else 1)
    groups = [{"params": [model.counts], "lr": 1.0}, {"params": model.net.parameters(), "momentum": 0.9}]
    model, optimizer = dt.distribute(model, torch.optim.SGD(groups, lr=0.01), plan=plan)
    sync, rank = here().loop.members[0].sync, dt.rank()
    assert isinstance(sync, Server)
    draw = torch.Generator().manual_seed(rank)
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while sync.step < _last(folder):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=draw, dtype=torch.float64), rank).backward()
        os.write(log, f"push {sync.step + 1}\n".encode())
        optimizer.step()
        values = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
        os.write(log, f"answered {sync.step} {sync.lines[0].version} {zlib.crc32(values)}\n".encode())
    dt.sync()
    os.write(log, f"end {sync.step} {model.counts[rank].item():g}\n".encode())


def _last(folder: Path) -> float:
    path = folder / "stop"
    return int(path.read_text()) if path.exists() else float("inf")


def stop(folder: Path) -> None:
    """Have every rank end at one step, some way ahead of all."""
    words = " ".join((folder / f"log.{rank}").read_text() for rank in range(WORLD)).split()
    last = max(int(step) for word, step in pairwise(words) if word == "answered")
    part = folder / "stop.part"
    part.write_text(str(last + AHEAD))
    part.rename(folder / "stop")


def faults(folder: Path) -> list[str]:
    """What is wrong in the logs of a job that has ended."""
    found: list[str] = []
    sums: dict[str, str] = {}
    for rank in range(WORLD):
        last = 0
        lines = (folder / f"log.{rank}").read_text().splitlines()
        for word, *numbers in map(str.split, lines):
            if word == "answered":
                step, version, total = numbers
                if int(step) <= last:
                    found.append(f"rank {rank}: step {step} after an answer to step {last}: an answered push was lost")
                last = int(step)
                if sums.setdefault(version, total) != total:
                    found.append(f"rank {rank}: version {version} has other parameters than before")
            elif word == "end" and int(numbers[0]) != float(numbers[1]):
                found.append(f"rank {rank}: {numbers[0]} steps, and {numbers[1]} pushes of it were applied")
        if not lines[-1].startswith("end"):
            found.append(f"rank {rank} did not come to its end")
    return found


def answered(folder: Path) -> Iterator[int]:
    """How many answers each rank has had so far."""
    for rank in range(WORLD):
        path = folder / f"log.{rank}"
        yield path.read_bytes().count(b"answered") if path.exists() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [*sys.argv, ""][3])
