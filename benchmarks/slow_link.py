"""Training over a slow link: seconds to one target loss at 100 Mbit/s and 1 Gbit/s, beside torch's own and torchft.

    python -m benchmarks.slow_link [--plans ddp "diloco(every=32)" ...] [--peers NAMES] [--rates 100mbit 1gbit]
                                   [--rounds 8] [--learning-rates 5e-4 1e-3] [--target L] [--at-most N]
                                   [--reuse] [--quick]

Two network namespaces as hosts, one rank of one thread on each, the GPT of 27M parameters with 4 x 128 tokens a rank;
AdamW, float32. The data are a made-up language (benchmarks/language.py), the same global batches for every variant.

1. Steps. Each variant trains from the same weights over an unlimited link until the loss on fixed held-out rows is at
   the target: evaluated every 5 steps, the mean of three neighbours, or, for variants that exchange now and then, after
   each exchange only, when there is one model. At each learning rate given; the one with the fewest steps counts.
   Counters of the interfaces give the bytes a step. One seed: steps have no interval.
2. Seconds a step, at each rate (`tc tbf` on what a host sends): paired rounds, all variants in each, in a new order
   (benchmarks/turns.py). "No exchange" is the same ranks without any: the floor in time; its loss does not count.
3. Seconds to the target are steps x seconds a step. Ratios have 95% intervals by resampling rounds.
4. The soonest of ours and of the peers at each rate train once more from the start at that rate, timed as a whole.

What is searched for every peer: the learning rates as for ours; for torch DDP its buckets (5, 25 and 100 MB) and hooks
(fp16, bf16, PowerSGD of rank 1, 2 and 4); for torchft's DiLoCo the period (20 and 100 steps), the outer learning rate
(0.4 and 0.7) and an exchange beside 5 steps of training. Each is a row; what is refused or fails stays one, with the
reason. Needs root, `ip` and `tc`. Stored in benchmarks/results/slow_link.json after each variant, with machine,
versions and commit; `--quick` (a tiny model, 2 rounds: does everything run?) writes to .peers/ instead. `--reuse` takes
steps from the stored file. In full it takes hours.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from typing import Any

from benchmarks import link_table
from benchmarks.bench import RESULTS, SETTINGS, origin
from benchmarks.conductor import HOMES, RankError, Setting
from benchmarks.links import WORLD, Task, confirm, learn
from benchmarks.peers import IDEAL, Variant
from benchmarks.turns import Timing, Turns
from tests.bed import Bed, missing

PLANS = (
    "ddp",
    "ddp,wire=fp16",
    "ddp,wire=int8",
    "ddp,wire=topk(0.01)",
    "ddp,wire=powersgd(rank=4)",
    "local(every=32)",
    "diloco(every=32)",
    "diloco(every=100)",
)
PEERS = {
    "torch DDP": Variant(file="torch_own", word="ddp"),
    "torch DDP, 5 MB": Variant(file="torch_own", word="ddp, buckets 5"),
    "torch DDP, 100 MB": Variant(file="torch_own", word="ddp, buckets 100"),
    "torch DDP, fp16": Variant(file="torch_own", word="ddp, fp16"),
    "torch DDP, bf16": Variant(file="torch_own", word="ddp, bf16"),
    "torch DDP, PowerSGD 1": Variant(file="torch_own", word="ddp, powersgd 1"),
    "torch DDP, PowerSGD 2": Variant(file="torch_own", word="ddp, powersgd 2"),
    "torch DDP, PowerSGD 4": Variant(file="torch_own", word="ddp, powersgd 4"),
    "torchft 20, 0.4": Variant(file="torchft", word="every=20 outer=0.4 delay=0", home="torchft"),
    "torchft 20, 0.7": Variant(file="torchft", word="every=20 outer=0.7 delay=0", home="torchft"),
    "torchft 20, 0.7, beside": Variant(file="torchft", word="every=20 outer=0.7 delay=5", home="torchft"),
    "torchft 100, 0.4": Variant(file="torchft", word="every=100 outer=0.4 delay=0", home="torchft"),
    "torchft 100, 0.7": Variant(file="torchft", word="every=100 outer=0.7 delay=0", home="torchft"),
}
SAME_STEPS = {"torch DDP, 5 MB": "torch DDP", "torch DDP, 100 MB": "torch DDP"}
"""Variants that train like another: only their times differ."""

TASK = Task(setting=SETTINGS["work"], target=6.0, at_most=300)
TINY = Setting(
    model={"layers": 2, "d": 64, "vocabulary": 512, "length": 32, "tied": 0}, batch=4, steps=2, parameters=170_000
)
QUICK = Task(setting=TINY, target=5.6, at_most=100)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="plans of ours")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[5e-4, 1e-3])
    parser.add_argument("--target", type=float, help=f"held-out loss, {TASK.target:g} where it is not given")
    parser.add_argument("--at-most", type=int, help=f"steps, {TASK.at_most} where it is not given")
    parser.add_argument("--reuse", action="store_true", help="take steps from the stored file")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds: does everything run?")
    return parser.parse_args()


class Run:
    """What is stored, written after every part of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        task = QUICK if given.quick else TASK
        self.task = replace(task, target=given.target or task.target, at_most=given.at_most or task.at_most)
        self.out = (HOMES if given.quick else RESULTS) / "slow_link.json"
        self.variants = {IDEAL: Variant(file="alone"), **{name: PEERS[name] for name in given.peers}}
        self.variants |= {plan: Variant(file="ours", word=plan) for plan in given.plans}
        known = self._known() if given.reuse else {}
        self.stored: dict[str, Any] = {
            "origin": origin(),
            "setting": vars(self.task.setting),
            "target": self.task.target,
            "at_most": self.task.at_most,
            "rates": given.rates,
            "rounds": 2 if given.quick else given.rounds,
            "learning_rates": given.learning_rates[-1:] if given.quick else given.learning_rates,
            "variants": {
                name: {"word": variant.word, "ours": variant.file == "ours", "failed": "", "seconds": {}}
                | {"relative": {}, "curves": known.get(name, {}).get("curves", {})}
                for name, variant in self.variants.items()
            },
            "confirmed": [],
        }

    def _known(self) -> dict[str, Any]:
        """The variants of the stored file, where it has the same model and target."""
        before = json.loads(self.out.read_text()) if self.out.exists() else {}
        same = before.get("target") == self.task.target and before.get("setting") == vars(self.task.setting)
        return dict(before["variants"]) if same else {}

    def write(self) -> None:
        self.out.parent.mkdir(exist_ok=True)
        self.out.write_text(json.dumps(self.stored, indent=1) + "\n")

    def learn(self, bed: Bed) -> None:
        """The steps of every variant at every learning rate, where they are not known yet."""
        for name, variant in self.variants.items():
            one = self.stored["variants"][name]
            if name == IDEAL or name in SAME_STEPS:
                continue
            for rate in self.stored["learning_rates"]:
                if str(rate) not in one["curves"] and not one["failed"]:
                    self._learn_at(bed, name, variant, rate)
            self.write()
        for name, other in SAME_STEPS.items():
            if {name, other} <= self.variants.keys():
                self.stored["variants"][name]["curves"] = self.stored["variants"][other]["curves"]

    def _learn_at(self, bed: Bed, name: str, variant: Variant, rate: float) -> None:
        one = self.stored["variants"][name]
        try:
            curve = learn(bed, name, variant, self.task, rate)
        except RankError as error:
            one["failed"] = str(error)
            print(f"{name}: {error}", flush=True)
        else:
            one["curves"][str(rate)] = asdict(curve)
            print(f"{name} at {rate:g}: steps {curve.steps}, last {curve.points[-1:]}", flush=True)

    def time(self, bed: Bed) -> None:
        """The seconds of a step of every variant that did not refuse."""
        there = {name: v for name, v in self.variants.items() if not self.stored["variants"][name]["failed"]}
        turns = Turns(bed, there, self.task.setting, self.stored["rates"])
        timings: dict[str, Timing] = turns.take(self.stored["rounds"])
        for name, timing in timings.items():
            self.stored["variants"][name] |= asdict(timing)
        self.write()

    def confirm(self, bed: Bed) -> None:
        """The soonest of ours and of the peers at each rate, as a whole."""
        rows = link_table.summary(self.stored)
        for rate in self.stored["rates"]:
            for ours in (True, False):
                if (name := link_table.fastest(self.stored, rate, ours=ours)) is None:
                    continue
                row, variant = rows[name], self.variants[name]
                at = {"rate": rate, "num_steps": math.ceil(row["steps"])}
                try:
                    whole = confirm(bed, name, variant, self.task, row["learning_rate"], **at)
                except RankError as error:
                    whole = {"variant": name, "rate": rate, "failed": str(error)}
                self.stored["confirmed"].append(whole)
                self.write()


def main() -> None:
    given = options()
    if unknown := [name for name in given.peers if name not in PEERS]:
        raise SystemExit(f"{unknown} given\n  needed: names of {list(PEERS)}\n  do: take them from there")
    if why := missing("tc"):
        raise SystemExit(f"{why}\n  needed: two network namespaces and a limit to their rate\n  do: run as root")
    run = Run(given)
    with Bed(hosts=WORLD) as bed:
        run.learn(bed)
        run.time(bed)
        run.confirm(bed)
    run.stored["table"] = link_table.summary(run.stored)
    run.stored["ratios"] = {rate: link_table.ratios(run.stored, rate) for rate in run.stored["rates"]}
    run.write()
    print(link_table.markdown(run.stored))


if __name__ == "__main__":
    main()
