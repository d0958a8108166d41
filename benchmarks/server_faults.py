"""Servers and workers killed in mid-run: `python -m benchmarks.server_faults [--kills 50] [--seed 0]`.

Jobs of three ranks, under `apart` with a server in a fourth process, whose parameters count what was applied
(tests/serve/counted.py) are killed by SIGKILL at random moments, ten times each, and started again by
`dtorch run --restarts`: first the process that has the server, then the others. At the end the logs of workers are
looked at: an answered push that is lost, a push that counts twice, a version that has other bytes than before. Two
sabotages must be seen. Writes benchmarks/results/server_faults.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
from benchmarks.step_time import machine  # noqa: E402
from tests.serve import counted  # noqa: E402
from tests.serve.killing import killed  # noqa: E402

PLANS = (
    "server(staleness=4)",
    "server",
    "server(staleness=0)",
    "server(ahead=2)",
    "server(staleness=2,compensate=0.1)",
    "server(apart,staleness=4)",
    "server(apart,staleness=0)",
)
PER_JOB = 10


def job(plan: str, victims: list[int], seed: int, sabotage: str = "") -> dict[str, Any]:
    """One job through its kills."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        faults = killed(folder, plan, victims, seed, sabotage)
        seconds, pushes = time.monotonic() - began, sum(counted.answered(folder))
    row = {"plan": plan, "killed": victims, "answered": pushes, "seconds": round(seconds, 1), "faults": faults[:3]}
    print(f"{plan}: ranks {victims} killed, {pushes} pushes answered, {seconds:.0f} s: {faults[:3] or 'nothing wrong'}")
    return row


def server_of(plan: str) -> int:
    """The process that has the server."""
    return counted.WORLD if "apart" in plan else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="also the plan to begin with")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    rows: dict[str, list[dict[str, Any]]] = {"server": [], "worker": []}
    for who, rows_of in rows.items():
        for number, first in enumerate(range(0, given.kills, PER_JOB)):
            count = min(PER_JOB, given.kills - first)
            plan = PLANS[(number + given.seed) % len(PLANS)]
            others = [0, 1, 2] if "apart" in plan else [1, 2]
            victims = [server_of(plan)] * count if who == "server" else [draw.choice(others) for _ in range(count)]
            rows_of.append(job(plan, victims, given.seed + number))
    sabotaged = {how: job(PLANS[0], [0], given.seed, how) for how in ("forgets", "twice")}
    faults = sum(len(row["faults"]) for rows_of in rows.values() for row in rows_of)
    unseen = [how for how, row in sabotaged.items() if not row["faults"]]
    result = {"kills each": given.kills, "faults": faults, "sabotages unseen": unseen, **rows, "sabotaged": sabotaged}
    about = machine() | {"command": " ".join(["python -m benchmarks.server_faults", *sys.argv[1:]])}
    path = ROOT / "benchmarks/results/server_faults.json"
    path.write_text(json.dumps({"machine": about, **result}, indent=1))
    print(f"{2 * given.kills} kills: {faults} faults; sabotages not seen: {unseen or 'none'}")
    return 1 if faults or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
