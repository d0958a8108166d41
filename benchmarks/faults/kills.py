"""C1: kill -9 at random moments of a save, of one rank or of all; the newest checkpoint is whole, and of one save.

Each world goes on from what the last killed one left, under another plan and number of ranks.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import PLANS, Tell, World
from distributedtorch import behind

WAYS = ("wait", "behind", "save_every")
_TRIALS_A_FOLDER = 25
_SECONDS_TO_KILL, _SECONDS_TO_GO_ON = 0.15, 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=560.0, help="stop then; the same command goes on")


def saver(tell: Tell, path: str, plan: str, way: str, sabotage: bool) -> None:
    """One rank: train and save, again and again, until killed."""
    if sabotage:
        states.write_in_place()
    training = states.Training(plan)
    dt.resume(path, save_every=1 if way == "save_every" else None, state=training.state)
    if dt.is_main():
        tell("from", training.counted.value)
    while True:
        former, value = behind.STATE.last, training.counted.value
        if dt.is_main():
            tell("begun", value + 1)
        training.step()
        if way != "save_every":
            dt.save(path, state=training.state, wait=way == "wait")
        if dt.is_main() and way == "wait":
            tell("done", value + 1)
        elif dt.is_main() and former is not None:  # at most one is under way; save_every's began at a forward
            tell("done" if not former._fault else "fault", value - (way == "save_every"), former._fault)


def trial(number: int, seed: int, folder: Path, *, sabotage: bool) -> dict[str, Any]:
    draw = random.Random(f"{seed}/{number}")
    root = folder / (f"twin-{number}" if sabotage else f"c-{number // _TRIALS_A_FOLDER}")
    ranks = 1 + number % 4
    plan = "ddp" if ranks == 1 else PLANS[number // 4 % 4]
    way, victim = draw.choice(WAYS), draw.choice(("one", "all"))
    from_when = draw.choice(("begun", "done")) if root.exists() else "done"
    world = World(folder, ranks, saver, str(root), plan, way, sabotage)
    ready = world.hear(lambda: len(world.pids) == ranks and bool(world.values(from_when)))
    time.sleep(draw.random() * _SECONDS_TO_KILL)
    if victim == "one":
        world.kill([world.pids.get(draw.randrange(ranks), world.supervisor)])
        time.sleep(draw.random() * _SECONDS_TO_GO_ON)
    world.end()
    wrong = [] if ready else [f"the world ended before it was killed: {world.said()}"]
    wrong += [f"a save failed: {line}" for line in world.told if line[0] == "fault"]
    values, damaged = states.looked_at(root)
    reported = max([*world.values("from"), *world.values("done")], default=0)
    begun = max(world.values("begun"), default=0)
    if not values or not reported <= values[0] <= begun:
        wrong.append(f"newest of {values} is not between {reported} (committed) and {begun} (begun)")
    left = bool(states.leftovers(root))
    if sabotage or (number + 1) % _TRIALS_A_FOLDER == 0:
        shutil.rmtree(root)
    how = {"ranks": ranks, "plan": plan, "way": way, "victim": victim}
    return how | {"left": left, "saves": len(world.values("done")), "wrong": wrong + damaged}


def many(
    numbers: range, seed: int, folder: Path, *, sabotage: bool = False, deadline: float = 1e18
) -> list[dict[str, Any]]:
    rows = []
    for number in numbers:
        if time.monotonic() > deadline:
            break
        rows.append(trial(number, seed, folder, sabotage=sabotage))
        for wrong in rows[-1]["wrong"] if not sabotage else []:
            print(f"    trial {number}: {wrong}", flush=True)
    return rows


def run(given: argparse.Namespace, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    states.warm()
    deadline = time.monotonic() + given.seconds
    goes_on = before.get("seed") == given.seed and before.get("trials", 0) < given.trials
    row = before if goes_on else {"trials": 0, "failed": 0, "left": 0, "saves": 0, "by": {}, "wrong": []}
    if not goes_on:
        twin = many(range(24), given.seed, folder, sabotage=True)
        row["sabotaged"] = {"write in place": [sum(bool(one["wrong"]) for one in twin), len(twin)]}
    rows = many(range(row["trials"], given.trials), given.seed, folder, deadline=deadline)
    by: dict[str, int] = dict(row["by"])
    for one in rows:
        for key in (f"{one['ranks']} ranks", one["plan"], one["way"], f"kill {one['victim']}"):
            by[key] = by.get(key, 0) + 1
    done = row["trials"] + len(rows)
    return {
        "trials": done,
        "seconds before": row.get("seconds", 0.0),
        "asked": given.trials,
        "failed": row["failed"] + sum(bool(one["wrong"]) for one in rows),
        "left": row["left"] + sum(one["left"] for one in rows),
        "saves": row["saves"] + sum(one["saves"] for one in rows),
        "by": dict(sorted(by.items())),
        "wrong": row["wrong"] + [wrong for one in rows for wrong in one["wrong"]][:20],
        "sabotaged": row["sabotaged"],
        "said": f"{row['left'] + sum(one['left'] for one in rows)} of the kills left a draft or half-removed folder",
    }
