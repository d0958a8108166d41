"""Runs the equality matrix: processes are started once per world size and take all its cases.

`python -m tests.conformance.matrix` runs all of it (`make matrix`); the tests run a covering subset.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import forked
from tests.conformance import cases as c

ROOT = forked.ROOT
LIMIT = {"float64": 1e-9}
WAYS = ("shared", "gloo", "hosts", "share", "hosts,share")
"""Through shared memory; over gloo; as if the ranks were on two hosts (three ranks or more); with the word `share`."""
ORDERS = range(5)
"""Orders of the rows in a batch: 0 as given, the others permuted."""


def write_truths(trainings: list[c.Training], folder: Path) -> None:
    """Train each in this one process, untouched, and keep the weights; float32 also with permuted rows."""
    torch.set_num_threads(1)
    for training in trainings:
        for order in ORDERS if training.dtype == "float32" else ORDERS[:1]:
            state = {k: v.clone().contiguous() for k, v in c.truth(training, order).state_dict().items()}
            save_file(state, folder / f"{training.name}-{order}.safetensors")


def run_world(
    world: int, chosen: list[c.Case], folder: Path, timeout: float = 600, *, way: str = "shared"
) -> list[dict[str, object]]:
    """Train `chosen` in one pool of `world` processes, exchanging in one of WAYS; a result row per case."""
    todo, done = folder / f"todo{world}.json", folder / f"done{world}.jsonl"
    todo.write_text(json.dumps([asdict(case) for case in chosen]))
    done.unlink(missing_ok=True)
    environ = {"DISTRIBUTEDTORCH_BUCKET_BYTES": str(c.BUCKET_BYTES), "DISTRIBUTEDTORCH_SHARED": str(int(way != "gloo"))}
    hosts = ",".join(str(rank % 2) for rank in range(world))
    module = [*(["tests.hosts", hosts] if "hosts" in way else []), "tests.conformance.pool", str(todo), str(done)]
    module += ["share"] if "share" in way.split(",") else []
    ended = forked.run(world, *module, cwd=folder, timeout=timeout, environ=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(row) for row in done.read_text().splitlines()]


def judge(row: dict[str, object], case: c.Case, folder: Path) -> str:
    """Empty when a result is within its bound, else the fault."""
    limit = LIMIT.get(case.training.dtype)
    if limit is None:
        given, *others = (load_file(folder / f"{case.training.name}-{order}.safetensors") for order in ORDERS)
        limit = max(4 * max(c.difference(given, other)[0] for other in others), 1e-6)
    gap = float(str(row["difference"]))
    return "" if gap <= limit else f"{row['parameter']} differs by {gap:.2e} > {limit:.2e}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="*", default=list(c.WORLDS))
    parser.add_argument("--dtypes", nargs="*", default=["float64", "float32"])
    parser.add_argument(
        "--ways", nargs="*", choices=WAYS, default=["shared"], help="all are to give the bits of the first"
    )
    given = parser.parse_args()
    trainings = [training for dtype in given.dtypes for training in c.all_trainings(dtype)]
    faults, total, worst = [], 0, dict.fromkeys(given.dtypes, 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_truths(trainings, folder)
        for world in given.worlds:
            chosen = [c.Case(training, plan, world) for training in trainings for plan in c.PLANS]
            rows, *again = (run_world(world, chosen, folder, timeout=7200, way=way) for way in given.ways)
            assert len(rows) == len(chosen)
            for other, way in zip(again, given.ways[1:], strict=True):
                differ = [case for a, b, case in zip(rows, other, chosen, strict=True) if a["bits"] != b["bits"]]
                faults += [f"{case.plan} world {world} {case.training.name}: other bits, {way}" for case in differ]
            for row, case in zip(rows, chosen, strict=True):
                total += 1
                worst[case.training.dtype] = max(worst[case.training.dtype], float(str(row["difference"])))
                fault = judge(row, case, folder)
                if fault:
                    faults.append(f"{case.plan} world {world} {case.training.name}: {fault}")
            print(f"world {world}: {len(rows)} cases, {len(faults)} faults so far", flush=True)
    print("\n".join(faults))
    print(f"{total} cases, {len(faults)} faults; largest difference {worst}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
