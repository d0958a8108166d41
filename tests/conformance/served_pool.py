"""What each process of a pool runs: what a server may be told to do, beside its history played again by hand.

`-m tests.conformance.served_pool rates|updates|rows|wires FOLDER [SABOTAGE]`: faults raise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import distributedtorch as dt
from distributedtorch.serve import rates
from distributedtorch.serve.rows import Changed
from distributedtorch.sync.served import Served
from distributedtorch.sync.updates import Updates
from distributedtorch.wire.feedback import Coded
from tests.conformance import served_rates, served_rows, served_updates, served_wires


def sabotage(what: str) -> None:
    if what == "options stay at home":
        rates.put = lambda optimizer, given: None  # type: ignore[assignment]
    elif what == "a change counts whole":
        twice = lambda self, changes: Served._push(self, [2 * one for one in changes])  # noqa: E731
        Updates._push = twice  # type: ignore[method-assign]
    elif what == "state of rank 0":
        Updates.take_own_state = lambda self, state: None  # type: ignore[method-assign]
    elif what == "rows forgotten":
        Changed.mark = lambda self, numbers, version: None  # type: ignore[method-assign]
    elif what == "left out and lost":
        reduced = Coded.reduced

        def forgets(self: Coded, which: str, *rest: Any) -> Tensor:
            self.left.pop(which, None)
            return reduced(self, which, *rest)

        Coded.reduced = forgets  # type: ignore[method-assign]
    else:
        raise AssertionError(what)


def main(what: str, folder: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for word in words:
        sabotage(word)
    parts = {"rates": served_rates, "updates": served_updates, "rows": served_rows, "wires": served_wires}
    parts[what].main(folder)
    dt.print(f"{what} as written out")


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
