"""What each process of a pool runs: every loop untouched, then under every plan, compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from tests.conformance.cases import PLANS, difference
from tests.conformance.tables import LOOPS


def state(result: Any) -> dict[str, torch.Tensor]:
    tensors = result.state_dict() if isinstance(result, torch.nn.Module) else result
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def main(done: Path, names: list[str]) -> None:
    """Run the loops named, or all; a first name such as `plans=ddp;zero2,share` says under which plans."""
    plans: Sequence[str] = PLANS
    if names and names[0].startswith("plans="):
        plans, names = names[0].removeprefix("plans=").split(";"), names[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in names or LOOPS:
        torch.manual_seed(1)
        truth = state(LOOPS[name](lambda *objects, words="": objects))
        for plan in plans:
            torch.manual_seed(1)
            sent = {k: t.count for k, t in here().comm.traffic.items()}
            found = state(LOOPS[name](lambda *objects, words="", plan=plan: dt.distribute(*objects, plan=plan + words)))
            gap, where = difference(truth, found)
            counts = {k: t.count - sent.get(k, 0) for k, t in here().comm.traffic.items()}
            row = {"loop": name, "plan": plan, "difference": gap, "where": where, "counts": counts}
            if dt.is_main():
                with done.open("a") as file:
                    print(json.dumps(row), file=file)
            release()


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), sys.argv[2:])
