"""One rank of one variant that learns a language: builds, then takes steps or evaluates when told.

JSON lines as in `worker`. The first is `{"file", "word", "model", "batch"}`, answered with versions, or with
`{"refused": why}` by a variant that is not to be had. Then `{"steps": k}` is answered with the seconds of each step,
and `{"evaluate": rows}` with the loss on this rank's part of so many held-out rows. Every step has a global batch of
its own, of which each rank takes its rows: all variants see the same.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.language import HELD_OUT, Language
from benchmarks.peers.loop import Step, loss_of
from benchmarks.peers.worker import facts, own_pipes
from benchmarks.step_time import Gpt

SEED = int(os.environ.get("BENCHMARK_SEED", "0"))
STEPS_A_SEED = 1_000_000


class Learner:
    """A model, the step that trains it, and the rows it is given."""

    def __init__(self, model: Gpt, step: Step, batch: int, agreed: Callable[[Gpt], Any]) -> None:
        self.model, self.step, self.batch, self.agreed = model, step, batch, agreed
        self.device = next(model.parameters()).device
        self.language, self.length = Language(model.token.num_embeddings), model.place.num_embeddings + 1
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.steps_taken = 0

    def rows(self, step: int, batch: int) -> Tensor:
        """This rank's rows of a global batch."""
        rows = self.language.rows(step, batch * self.world, self.length)
        return rows[self.rank * batch : (self.rank + 1) * batch].to(self.device)

    def learn(self, num_steps: int) -> list[float]:
        """Take steps; the seconds of each."""
        seconds = []
        for _ in range(num_steps):
            ids = self.rows(SEED * STEPS_A_SEED + self.steps_taken, self.batch)
            began = time.perf_counter()
            self.step(ids)
            seconds.append(time.perf_counter() - began)
            self.steps_taken += 1
        return seconds

    @torch.no_grad()
    def evaluate(self, num_rows: int) -> float:
        """The mean loss on this rank's part of the held-out rows."""
        parts = self.rows(HELD_OUT, num_rows // self.world).split(self.batch)
        with self.agreed(self.model):
            return sum(float(loss_of(self.model, part)) * len(part) for part in parts) / (num_rows // self.world)


def main() -> None:
    heard, said = own_pipes()
    given = json.loads(heard.readline())
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision(os.environ.get("BENCHMARK_PRODUCTS", "highest"))
    model = Gpt(**given["model"]).to(os.environ.get("BENCHMARK_DEVICE", "cpu"))
    try:
        library = importlib.import_module(f"benchmarks.peers.{given['file']}")
        step: Step = library.build(given["word"], model)
    except Exception as error:  # whatever a library says no with
        why = (str(error).strip() or "without a word").splitlines()[0]
        print(json.dumps({"refused": f"{type(error).__name__}: {why}"}), file=said)
        raise
    learner = Learner(model, step, given["batch"], getattr(library, "agreed", nullcontext))
    print(json.dumps({"versions": facts(given["model"])["versions"]}), file=said)
    while line := heard.readline():
        told = json.loads(line)
        if "steps" in told:
            print(json.dumps({"seconds": learner.learn(told["steps"])}), file=said)
        else:
            print(json.dumps({"loss": learner.evaluate(told["evaluate"])}), file=said)
    sys.stderr.flush()
    os._exit(0)  # the groups of ranks end together, without waiting for each other


if __name__ == "__main__":
    main()
