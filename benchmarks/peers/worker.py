"""One rank of one variant: builds, warms up, then takes steps when told; blocked on its pipe in between.

JSON lines come in on stdin and go out on stdout; what libraries print goes to stderr. The first line is
`{"file", "word", "model", "batch", "warmup"}`, each later one `{"steps": k}`; the end of stdin is the end.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import IO, Any

import torch
from torch import Tensor

from benchmarks.peers.loop import Step
from benchmarks.step_time import Gpt

LIBRARIES = ("torch", "numpy", "accelerate", "lightning", "deepspeed", "torchft")


def own_pipes() -> tuple[IO[str], IO[str]]:
    """The pipes to the conductor, out of reach of everything that prints or reads."""
    heard, said = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return heard, said


def facts(model: dict[str, int]) -> dict[str, Any]:
    """What ran, told by the process that ran it."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    there = torch.distributed.is_initialized()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Gpt(**model).parameters())
    return {
        "versions": versions,
        "backend": torch.distributed.get_backend() if there else "none",
        "threads": torch.get_num_threads(),
        "parameters": parameters,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def rows(batch: int, length: int, vocabulary: int) -> Iterator[Tensor]:
    """This rank's batches: some tokens are frequent, other ones on each rank, so that losses tell who averaged what."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draw = torch.Generator().manual_seed(rank)
    while True:
        ids = (torch.rand(batch, length, generator=draw) ** 3 * vocabulary).long()
        yield (ids + rank * vocabulary // world) % vocabulary


def main() -> None:
    heard, said = own_pipes()
    given = json.loads(heard.readline())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(**given["model"])
    step: Step = importlib.import_module(f"benchmarks.peers.{given['file']}").build(given["word"], model)
    batches = rows(given["batch"], given["model"]["length"] + 1, given["model"]["vocabulary"])

    def steps(count: int) -> float:
        for ids in itertools.islice(batches, count):
            loss = step(ids)
        return float(loss)

    steps(given["warmup"])
    print(json.dumps(facts(given["model"])), file=said)
    while line := heard.readline():
        before = time.process_time()
        loss = steps(json.loads(line)["steps"])
        print(json.dumps({"loss": loss, "cpu": [before, time.process_time()]}), file=said)
    sys.stderr.flush()
    os._exit(0)  # the groups of ranks end together, without waiting for each other


if __name__ == "__main__":
    main()
