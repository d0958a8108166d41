"""What each process of a pool runs: one case after the other, each compared to its truth."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from tests.conformance import cases as c


def main(todo: Path, done: Path, words: Sequence[str]) -> None:
    """Train; `words` join the plans that they go with."""
    torch.set_num_threads(1)
    for row in json.loads(todo.read_text()):
        case = c.Case(c.Training(**row["training"]), row["plan"], row["world"])
        plan = ",".join((c.plan_of(case), *(words if case.plan in ("zero1", "zero2") else ())))
        model = c.train(case.training, partial(dt.distribute, plan=plan))
        state = model.state_dict()
        gap, where = c.difference(load_file(todo.parent / f"{case.training.name}-0.safetensors"), state)
        bits = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in state.values())).hexdigest()
        buckets = [len(m.sync.collect.cells) for m in here().loop.members] if dt.world() > 1 else []  # type: ignore[attr-defined]
        if dt.is_main():
            with done.open("a") as file:
                print(json.dumps({"difference": gap, "parameter": where, "buckets": buckets, "bits": bits}), file=file)
        release()


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
