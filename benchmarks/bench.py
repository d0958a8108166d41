"""Step time beside torch's own and other libraries', and how cost grows: `make bench`, or

    python -m benchmarks.bench [--setting work|small|growth] [--rounds 40] [--ranks 2] [--only NAMES] [--quick]

Every variant (benchmarks/peers/) has its own rank processes, one thread each; in each round every variant takes a few
steps, in a new order, while the others sleep, and every ten rounds all start anew; where they do not all fit into
memory there are several groups, each with "no exchange" and torch DDP. Figures are medians and ratios within rounds
with 95% intervals by resampling rounds. Settings: "work", a GPT of 27M parameters with 4 x 128 tokens a rank; "small",
the same model with 1 x 32, where exchange is most of a step; "growth", 1M, 10M and 100M parameters with 4 x 32 at 1, 2,
4 and 8 ranks, a quarter of the rounds. Stored in benchmarks/results/bench.json with every round's seconds, machine,
versions and commit, and drawn as bench.png; `--quick` and `--only` write to .peers/ instead. README's figures come from
the stored file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.conductor import HOMES, ROOT, Outcome, Setting, grouped, prepare, rounds
from benchmarks.peers import IDEAL, VARIANTS
from benchmarks.step_time import machine

RESULTS = ROOT / "benchmarks/results"
GPT = {"layers": 6, "d": 512, "vocabulary": 8192, "tied": 0}
SETTINGS = {
    "work": Setting(model={**GPT, "length": 128}, batch=4, steps=2, parameters=27_400_000),
    "small": Setting(model={**GPT, "length": 32}, batch=1, steps=3, parameters=27_400_000),
}
SIZES = {
    "1M": Setting(
        model={"layers": 4, "d": 128, "vocabulary": 2048, "length": 32}, batch=4, steps=20, parameters=1_100_000
    ),
    "10M": Setting(
        model={"layers": 6, "d": 320, "vocabulary": 8192, "length": 32}, batch=4, steps=5, parameters=10_000_000
    ),
    "100M": Setting(
        model={"layers": 12, "d": 768, "vocabulary": 20480, "length": 32}, batch=4, steps=1, parameters=101_000_000
    ),
}
GROWTH_RANKS = (1, 2, 4, 8)
GROWTH_VARIANTS = [IDEAL, "ddp", "torch DDP"]


def origin() -> dict[str, Any]:
    """Machine, versions, commit and command; whether what was measured differs from that commit."""
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    changed = subprocess.run(
        ["git", "status", "--porcelain", "src", "benchmarks/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    when = time.strftime("%Y-%m-%d", time.gmtime())
    return {**machine(), "processor": cpu[0], "memory_gib": memory, "changed": changed.stdout.split(), "date": when}


def measure(names: list[str], num_ranks: int, setting: Setting, num_rounds: int) -> dict[str, Any]:
    """One table: all variants together, or in groups that fit into memory."""
    paired, groups = grouped(names, num_ranks, setting)
    outcomes = [rounds(group, num_ranks, setting, num_rounds) for group in groups]
    seconds = [{name: o.seconds for name, o in group.items() if not o.failed} for group in outcomes]
    merged = {name: group[name] for name in names for group in outcomes[::-1] if name in group}  # the first group's
    if paired:
        tables = [figures.table(group) for group in seconds]
    else:
        tables = [figures.table({name: o.seconds for name, o in merged.items() if not o.failed})]
    return {
        "origin": origin(),
        "ranks": num_ranks,
        "rounds": num_rounds,
        "setting": vars(setting),
        "paired": paired,
        "table": {name: table[name] for name in names for table in tables[::-1] if name in table},
        "variants": {name: described(outcome) for name, outcome in merged.items()},
        "seconds": [{name: [round(v, 5) for v in values] for name, values in group.items()} for group in seconds],
    }


def described(outcome: Outcome) -> dict[str, Any]:
    waited = outcome.seconds_idle > 1  # alone in its group, it never did
    return {
        "failed": outcome.failed,
        **outcome.facts,
        "idle_core_share": round(outcome.seconds_idle_cpu / outcome.seconds_idle, 4) if waited else None,
        "losses": [round(v, 5) for v in outcome.losses],
    }


def growth(num_rounds: int, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    cells = []
    for size, setting in SIZES.items():
        for num_ranks in ranks:
            print(f"growth: {size} parameters, {num_ranks} ranks", flush=True)
            cells.append({"size": size, **measure(GROWTH_VARIANTS, num_ranks, setting, num_rounds)})
    return cells


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=(*SETTINGS, "growth"), help="one of them; all where it is not given")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, help="2; 1, 2, 4 and 8 for growth")
    parser.add_argument("--only", help="names of variants, with commas between them; growth has its own", default="")
    parser.add_argument("--quick", action="store_true", help="3 rounds: does everything run?")
    return parser.parse_args()


def main() -> None:
    given = options()
    num_rounds = 3 if given.quick else given.rounds
    only = [name.strip() for name in given.only.split(",") if name.strip()]
    if unknown := [name for name in only if name not in VARIANTS]:
        raise SystemExit(f"{unknown} given, but the variants are {list(VARIANTS)}: take names from there")
    out = HOMES / "bench.json" if given.quick or only else RESULTS / "bench.json"
    prepare(list(dict.fromkeys(VARIANTS[name].home for name in only or VARIANTS)), SIZES["1M"])
    stored = json.loads(out.read_text()) if out.exists() else {}
    for name in [given.setting] if given.setting else (*SETTINGS, "growth"):
        if name == "growth":
            ranks = (given.ranks,) if given.ranks else GROWTH_RANKS
            stored[name] = growth(max(3, num_rounds // 4), ranks)
        else:
            print(f"{name}: {given.ranks or 2} ranks", flush=True)
            stored[name] = measure(only or list(VARIANTS), given.ranks or 2, SETTINGS[name], num_rounds)
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(stored, indent=1) + "\n")  # after each setting: what was measured is kept
        print(figures.markdown(stored), flush=True)
    figures.picture(stored, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
