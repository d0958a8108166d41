"""A recorded run, read back: what the ranks wrote, put together into what one process would have written."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from distributedtorch.verify.record import FINAL
from distributedtorch.verify.sketch import distance, norm

Sketches = dict[str, list[float]]

_SAME = 1e-10
"""Relative difference of two sketches below which the tensors have the same bits: sums in another order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of a run."""

    lr: list[float]
    """Of each group, as this step used it."""
    losses: list[float]
    """Of each backward since the last step: the mean over all ranks' rows."""
    rows: list[Counter[str]]
    """How often each row was seen by all ranks together, for each batch since the last step."""
    rows_of_ranks: list[list[int]]
    """How many rows each rank had, for each batch since the last step."""
    gradient: Sketches
    """As backward left it."""
    used: Sketches
    """As the optimizer used it: after clipping."""
    state: Sketches
    """Parameters and buffers after the step, on rank 0."""
    drifted: list[str]
    """Parameters and buffers that are not the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a parameter or buffer is."""

    dtype: str
    numel: int
    trained: bool
    """A parameter; else a buffer."""


@dataclass
class Run:
    """What a run left behind."""

    world: int = 1
    quiet: list[str] = field(default_factory=list)
    """Dropout that was set to 0."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    initial: Sketches = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers in full after the last step; empty where the run left none."""


def read(folder: Path) -> Run:
    """Put together what the ranks of a run wrote; without steps where the script never took one."""
    ranks = [_lines(path) for path in sorted(folder.glob("rank*.jsonl"))]
    run = Run(world=len(ranks))
    for line in ranks[0] if ranks else []:
        if "step" not in line:
            run.quiet += line["quiet"]
            kinds = line["kinds"].items()
            run.kinds |= {name: Kind(dtype=d, numel=n, trained=trained) for name, (d, n, trained) in kinds}
            run.initial |= {name: line["state"][name] for name in line["state"] if name not in run.initial}
    per_rank = [[line for line in lines if "step" in line] for lines in ranks]
    run.steps = [_step(lines) for lines in zip(*per_rank, strict=False)]
    if (folder / FINAL).exists():
        with safe_open(folder / FINAL, framework="pt") as file:
            if int(file.metadata()["steps"]) == len(run.steps):
                run.final = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _step(ranks: Sequence[dict[str, Any]]) -> Step:
    first = ranks[0]
    batches = list(zip(*(rank["rows"] for rank in ranks), strict=False))
    backwards = zip(*(rank["losses"] for rank in ranks), strict=False)
    return Step(
        lr=first["lr"],
        losses=[_mean(parts) for parts in backwards],
        rows=[Counter(itertools.chain.from_iterable(parts)) for parts in batches],
        rows_of_ranks=[[len(part) for part in parts] for parts in batches],
        gradient=first["gradient"],
        used=first["used"],
        state=first["state"],
        drifted=[name for name in first["state"] if any(_drifted(first, rank, name) for rank in ranks[1:])],
    )


def _mean(parts: Sequence[Sequence[float]]) -> float:
    """The mean of the ranks' losses by their units; a rank without any counts for nothing."""
    units = sum(n for _, n in parts)
    return sum(loss * n for loss, n in parts if n) / units if units else 0.0


def _drifted(first: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    one, two = first["state"][name], other["state"][name]
    return bool(distance(one, two) > _SAME * max(norm(one), norm(two)))
