"""How many steps each variant of benchmarks/slow_link.py needs to one target loss.

    python -m benchmarks.link_steps [--device cuda] [--lanes 8] [--learning-rates 5e-4 7e-4 1e-3]
                                    [--seeds 3] [--calibrate 100] [--at-most 200] [--target L] [--known FILE]
                                    [--variants NAMES]
                                    [--products medium] [--first-port 20000] [--out FILE] [--quick]

The GPT of 27M parameters, two ranks with 4 x 128 tokens each, AdamW, float32, a usual recipe (links.RECIPE), a made-up
language (benchmarks/language.py), the same global batches for every variant. What is learned in a step does not hang on
the link or on the processor, so ranks may share a GPU and several jobs may run at once (`--lanes`). `--products
medium`: products of matrices by bfloat16 numbers, for all variants alike, which takes 0.6 of the time on some
processors.

1. The target is the smallest held-out loss that torch DDP has after `--calibrate` steps at any of the learning rates.
2. Each variant trains from the same weights at each learning rate until it is at the target: evaluated every 5 steps,
   the mean of three neighbours, or, for variants that exchange now and then, after each exchange only, when there is
   one model, and by a straight line in between. Under `delay` there never is: evaluated is the mean of replicas, which
   is what dt.sync() would leave. The learning rate with the fewest steps counts.
3. At that learning rate the other seeds: other weights, other batches.

Writes benchmarks/results/link_steps.json after each run; `--quick` is a tiny model, into .peers/. `--join FILES` runs
nothing: it makes one file of several of the same target (`--out`), in which seeds are those of a variant's best rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, SETTINGS, origin
from benchmarks.conductor import HOMES, RankError, Setting
from benchmarks.link_table import best_curve
from benchmarks.links import RECIPE, Curve, Loopback, Task, evaluated, learn, ports_from, reached
from benchmarks.peers import Variant
from benchmarks.slow_link import PEERS, PLANS, SAME_STEPS, TINY

BASE = "torch DDP"
NEIGHBOURS = 3


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[5e-4, 7e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calibrate", type=int, default=100)
    parser.add_argument("--target", type=float, help="of an earlier run, for more variants")
    parser.add_argument("--at-most", type=int, default=200)
    parser.add_argument("--variants", nargs="+", help="peers' names and plans; all where none is given")
    parser.add_argument("--products", default="highest", help="torch's word for how exact those of matrices are")
    parser.add_argument("--first-port", type=int, default=20_000, help="another for a second run beside this one")
    parser.add_argument("--known", type=Path, help="an earlier run with this target: its first seed is not run again")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="of earlier runs, into --out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    return parser.parse_args()


class Steps:
    """What is stored, written after every run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.out = given.out or (HOMES if given.quick else RESULTS) / "link_steps.json"
        setting: Setting = TINY if given.quick else SETTINGS["work"]
        self.task = Task(setting=setting, target=0.0, at_most=given.at_most)
        plans = {plan: Variant(file="ours", word=plan) for plan in PLANS}
        known = {name: variant for name, variant in {**PEERS, **plans}.items() if name not in SAME_STEPS}
        wanted = given.variants or list(known)
        self.variants = {name: known.get(name) or Variant(file="ours", word=name) for name in wanted}
        self.bed = Loopback(given.device)
        self.known: dict[float, Curve] = {}
        """By learning rate, where torch DDP came to the target when that was set."""
        self.stored: dict[str, Any] = {
            "origin": {**origin(), "device": given.device},
            "setting": vars(setting),
            "calibrate": given.calibrate,
            "at_most": given.at_most,
            "recipe": RECIPE,
            "products": given.products,
            "learning_rates": given.learning_rates,
            "variants": {name: {"failed": "", "curves": {}, "seeds": {}} for name in self.variants},
        }

    def take_over(self, file: Path) -> None:
        """Curves of an earlier run."""
        known = json.loads(file.read_text())
        refuse_others([known, {**self.stored, "target": self.task.target}])
        for name, found in known["variants"].items():
            for rate, curve in found["curves"].items() if name in self.variants else ():
                _, smooth = evaluated(self.variants[name].word)
                curve["steps"] = reached(curve["points"], self.task.target, smooth=smooth)
                self.stored["variants"][name]["curves"][rate] = curve

    def calibrate(self) -> None:
        """Set the target by what torch DDP reaches."""
        if self.given.target:
            self.task = replace(self.task, target=self.given.target)
            self.stored["target"] = self.given.target
            return
        to_the_end = replace(self.task, at_most=self.given.calibrate)
        with ThreadPoolExecutor(self.given.lanes) as lanes:
            rates = self.given.learning_rates
            curves = list(lanes.map(lambda lr: learn(self.bed, BASE, PEERS[BASE], to_the_end, lr), rates))
        last = [statistics.fmean(loss for _, loss in curve.points[-NEIGHBOURS:]) for curve in curves]
        self.task = replace(self.task, target=min(last))
        for rate, curve in zip(rates, curves, strict=True):
            curve.steps = reached(curve.points, self.task.target, smooth=True)
            self.known |= {rate: curve} if curve.steps is not None else {}
        self.stored |= {"target": self.task.target, "calibrated": dict(zip(map(str, rates), last, strict=True))}
        print(f"target {self.task.target:.4f} of {last}", flush=True)

    def take(self, jobs: list[tuple[str, float, int]]) -> None:
        with ThreadPoolExecutor(self.given.lanes) as lanes:
            list(lanes.map(lambda job: self._take(*job), jobs))

    def _take(self, name: str, rate: float, seed: int) -> None:
        one = self.stored["variants"][name]
        try:
            known = self.known.get(rate) if name == BASE and seed == 0 else None
            curve = known or learn(self.bed, name, self.variants[name], self.task, rate, seed=seed)
        except RankError as error:
            one["failed"] = str(error)
            print(f"{name} at {rate:g}: {error}", flush=True)
            return
        if seed == 0:
            one["curves"][str(rate)] = asdict(curve)
        else:
            one["seeds"][str(seed)] = curve.steps
        print(f"{name} at {rate:g}, seed {seed}: {curve.steps} steps, last {curve.points[-1:]}", flush=True)
        self.out.write_text(json.dumps(self.stored, indent=1) + "\n")

    def run(self) -> None:
        self.calibrate()
        if self.given.known:
            self.take_over(self.given.known)
        every = [(name, rate, 0) for rate in self.given.learning_rates for name in self.variants]
        self.take([job for job in every if str(job[1]) not in self.stored["variants"][job[0]]["curves"]])
        best = {name: best_curve(one) for name, one in self.stored["variants"].items()}
        there = {name: float(found[0]) for name, found in best.items() if found and found[1]["steps"] is not None}
        self.take([(name, rate, seed) for seed in range(1, self.given.seeds) for name, rate in there.items()])


def refuse_others(runs: list[dict[str, Any]]) -> None:
    """Runs that are not of one target, model and recipe cannot be compared."""
    if len({json.dumps([one.get(key) for key in ("target", "setting", "recipe", "products")]) for one in runs}) > 1:
        given = "files of several targets, models or recipes"
        raise SystemExit(f"{given}\n  needed: one of each\n  do: name those that belong together")


def joined(files: list[Path]) -> dict[str, Any]:
    """What several runs with one target have stored, as if it were one run."""
    every = [json.loads(file.read_text()) for file in files]
    refuse_others(every)
    origins = [one["origin"] if isinstance(one["origin"], list) else [one["origin"]] for one in every]
    whole: dict[str, Any] = {**every[0], "origin": [origin for some in origins for origin in some], "variants": {}}
    whole["learning_rates"] = sorted({rate for one in every for rate in one["learning_rates"]})
    for one in every:
        for name, found in one["variants"].items():
            known = whole["variants"].setdefault(name, {"failed": found["failed"], "curves": {}, "seeds": {}})
            before = best_curve(known)
            known["curves"] |= found["curves"]
            if best_curve(known) != before:
                known["seeds"] = found["seeds"]
            elif before and before == best_curve(found):
                known["seeds"] |= found["seeds"]
    return whole


def main() -> None:
    given = options()
    if given.join:
        given.out.write_text(json.dumps(joined(given.join), indent=1) + "\n")
        return
    ports_from(given.first_port)
    os.environ["BENCHMARK_PRODUCTS"] = given.products
    Steps(given).run()


if __name__ == "__main__":
    main()
