"""What each process of a pool runs: one evaluation after the other, each compared to its truth, ranks compared too.

`python -m tests.evaluate.pool DONE` runs the table; at two ranks also each broken build on the case that must catch it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import distributedtorch as dt
from distributedtorch.core.world import here
from tests.evaluate.cases import CASES, difference, names
from tests.evaluate.refusals import refused
from tests.evaluate.sabotage import SABOTAGES


def rows() -> Iterator[dict[str, Any]]:
    for name in names(dt.world()):
        expected, result = CASES[name]()
        answers = here().comm.bytes_of_all("test", repr(sorted(result.items())).encode()) if dt.world() > 1 else []
        yield {"case": name, "difference": difference(expected, result), "agree": len(set(answers)) <= 1}


def sabotaged() -> Iterator[dict[str, Any]]:
    for name, (breaking, case) in SABOTAGES.items():
        with breaking():
            expected, result = CASES[case]()
        yield {"sabotage": name, "difference": difference(expected, result)}


def main(done: Path) -> None:
    torch.set_num_threads(1)
    for row in chain(rows(), refused(), sabotaged() if dt.world() == 2 else ()):
        if dt.is_main():
            with done.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
