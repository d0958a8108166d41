"""Checkpoints under faults: kills, flipped bits, damage, hostile files, full disks, and the order of system calls.

`python benchmarks/checkpoint_faults.py kills|points|flips|damage|fuzz|full|trace` (or `all`) writes its row of
benchmarks/results/checkpoint_faults.json. Each runs in the foreground for at most 10 minutes, and beside it a
sabotaged twin of the library that it must catch. `full` needs root for a file system of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.faults import damage, flips, full, fuzz, kills, points, trace  # noqa: E402
from benchmarks.step_time import machine  # noqa: E402

BARS = {"kills": kills, "points": points, "flips": flips, "damage": damage, "fuzz": fuzz, "full": full, "trace": trace}
RESULTS = ROOT / "benchmarks/results/checkpoint_faults.json"


def bound(failed: int, trials: int) -> str:
    """What a count supports."""
    if trials < 4:
        return "too few for a rate"
    return f"rate below {3 / trials:.2g} at 95%" if not failed else f"rate {failed / trials:.2g}"


def measure(name: str, given: argparse.Namespace) -> int:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    began, before = time.monotonic(), results.get(name, {})
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        row = BARS[name].run(given, Path(folder), before)
    seconds = time.monotonic() - began + row.pop("seconds before", 0.0)
    caught = all(found > 0 for found, _ in row["sabotaged"].values())
    row |= {"bound": bound(row["failed"], row["trials"]), "seconds": round(seconds, 1), "caught": caught}
    row |= {"seed": getattr(given, "seed", 0), "machine": machine()}
    row["machine"]["command"] = "python " + os.path.relpath(sys.argv[0], ROOT) + " " + " ".join(sys.argv[1:])
    twins = ", ".join(f"{what} {found} of {tried}" for what, (found, tried) in row["sabotaged"].items())
    print(
        f"{name:7} {row['failed']} failed of {row['trials']:,} ({row['bound']}), {row['seconds']:.0f} s; "
        f"{row.pop('said')}; sabotaged twins noticed: {twins}",
        flush=True,
    )
    for wrong in row.get("wrong", [])[:10]:
        print(f"    {wrong}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**results, name: row}, indent=1) + "\n")
    return row["failed"] + (not caught)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="bar", required=True)
    for name, bar in BARS.items():
        bar.arguments(commands.add_parser(name, help=(bar.__doc__ or "").splitlines()[0]))
    commands.add_parser("all", help="every bar as it is by default")
    given = parser.parse_args()
    if given.bar != "all":
        return measure(given.bar, given)
    failed = 0
    for name in BARS:  # each in a process of its own: `full` enters a namespace, `fuzz` limits its memory
        failed += os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, name]) != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
