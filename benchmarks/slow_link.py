"""Training over a slow link: seconds to one target loss at 100 Mbit/s and 1 Gbit/s, beside torch's own and torchft.

    python -m benchmarks.slow_link [--plans ddp "diloco(every=32)" ...] [--peers NAMES] [--rates 100mbit 1gbit]
                                   [--rounds 6] [--search 0] [--confirm] [--out FILE] [--quick]

Two network namespaces as hosts, one rank of one thread on each, the GPT of 27M parameters with 4 x 128 tokens a rank;
AdamW, float32. The data are a made-up language (benchmarks/language.py), the same global batches for every variant.

1. Steps to the target are those of benchmarks/link_steps.py, which has to have run.
2. Seconds a step, at each rate (`tc tbf` on what a host sends): paired rounds, all variants in each, in a new order
   (benchmarks/turns.py), and bytes by the interfaces' counters. "No exchange" is the same ranks without any: the floor
   in time; its loss does not count. "Memory kept": malloc is told what `dt.distribute` tells it. `--search`: so many
   rounds of all first; `--rounds` then only of no exchange, torch DDP, and of ours and of the peers the three that are
   soonest at the target at each rate.
3. Seconds to the target are steps x seconds a step. Ratios have 95% intervals by resampling rounds and seeds.
4. `--confirm`: the soonest of ours and of the peers at each rate train once more from the start at that rate, timed as
   a whole.

What is searched for every peer: the learning rates as for ours; for torch DDP its buckets (5, 25 and 100 MB) and hooks
(fp16, bf16, PowerSGD of rank 1, 2, 4 and 16); for torchft's DiLoCo the period (8, 16, 20 and 100 steps), the outer
learning rate and momentum (0.4 or 0.7 with 0.9, 1.0 with 0.5 or 0.3), and an exchange beside 5 steps of training. Each
is a row; what is refused or fails stays one, with the reason. Needs root, `ip` and `tc`. Stored in
benchmarks/results/slow_link.json after each part, with machine, versions and commit; `--quick` (a tiny model, 3 rounds:
does everything run?) writes to .peers/ instead.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import link_table
from benchmarks.bench import RESULTS, SETTINGS, origin
from benchmarks.conductor import HOMES, RankError, Setting
from benchmarks.links import RECIPE, WORLD, confirm, period, stages
from benchmarks.peers import IDEAL, Variant
from benchmarks.turns import Timing, Turns
from tests.bed import Bed, missing

PLANS = (
    "ddp",
    "ddp,wire=fp16",
    "ddp,wire=int8",
    "ddp,wire=int4",
    "ddp,wire=int2",
    "ddp,wire=powersgd(rank=16)",
    "local(every=4,rows=used),wire=int8",
    "local(every=4,rows=used),wire=int4",
    "local(every=8,rows=used),wire=int4",
    "local(every=8,rows=used),delay=2,wire=int4",
    "local(every=16,rows=used),wire=int4",
    "local(every=4),wire=int8",
    "local(every=4),wire=int4",
    "local(every=8),wire=int8",
    "local(every=8),wire=int4",
    "local(every=8),wire=int2",
    "local(every=16),wire=int8",
    "local(every=16),wire=int4",
    "local(every=16),wire=int2",
    "diloco(every=32,lr=1.0,momentum=0.5),wire=int8",
)
TORCHFT = (
    *((every, 1.0, 0.3, 0) for every in (8, 16)),
    *((every, *outer, 0) for every in (20, 100) for outer in ((0.4, 0.9), (0.7, 0.9), (1.0, 0.5))),
    (20, 0.7, 0.9, 5),
)
"""Period, outer learning rate and momentum, steps beside an exchange."""
PEERS = {
    "torch DDP": Variant(file="torch_own", word="ddp"),
    "torch DDP, 5 MB": Variant(file="torch_own", word="ddp, buckets 5"),
    "torch DDP, 100 MB": Variant(file="torch_own", word="ddp, buckets 100"),
    "torch DDP, fp16": Variant(file="torch_own", word="ddp, fp16"),
    "torch DDP, bf16": Variant(file="torch_own", word="ddp, bf16"),
    "torch DDP, PowerSGD 1": Variant(file="torch_own", word="ddp, powersgd 1"),
    "torch DDP, PowerSGD 2": Variant(file="torch_own", word="ddp, powersgd 2"),
    "torch DDP, PowerSGD 4": Variant(file="torch_own", word="ddp, powersgd 4"),
    "torch DDP, PowerSGD 16": Variant(file="torch_own", word="ddp, powersgd 16"),
    **{
        f"torchft {every}, {outer}, {momentum}{', beside' if delay else ''}": Variant(
            file="torchft", word=f"every={every} outer={outer} momentum={momentum} delay={delay}", home="torchft"
        )
        for every, outer, momentum, delay in TORCHFT
    },
}
KEPT, IDEAL_KEPT = ", memory kept", f"{IDEAL}, memory kept"
SAME_STEPS = dict.fromkeys(
    ("torch DDP, 5 MB", "torch DDP, 100 MB", "torch DDP, fp16", "torch DDP, bf16", "ddp", "ddp,wire=fp16"), "torch DDP"
)
SAME_STEPS |= {f"{name}{KEPT}": SAME_STEPS.get(name, name) for name in PEERS}
PEERS |= {f"{name}{KEPT}": replace(variant, kept=True) for name, variant in PEERS.items()}
"""Variants that train like another: only their times differ (with 16 bits by 1% of the steps at three rates)."""

TINY = Setting(
    model={"layers": 2, "d": 64, "vocabulary": 512, "length": 32, "tied": 0}, batch=4, steps=2, parameters=170_000
)
BASES, BEST = (IDEAL, IDEAL_KEPT, "torch DDP"), 3


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="plans of ours")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--search", type=int, default=0, help="time all so often first, and only the best after that")
    parser.add_argument("--confirm", action="store_true", help="train the soonest as a whole too")
    parser.add_argument("--out", type=Path, default=RESULTS / "slow_link.json")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds: does everything run?")
    return parser.parse_args()


class Run:
    """What is stored, written after every part of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.setting = TINY if given.quick else SETTINGS["work"]
        self.out = HOMES / "slow_link.json" if given.quick else given.out
        learned = json.loads(((HOMES if given.quick else RESULTS) / "link_steps.json").read_text())
        if (learned["setting"], learned.get("recipe")) != (vars(self.setting), RECIPE):
            raise SystemExit("link_steps.json is of another model or schedule\n  do: run benchmarks.link_steps again")
        self.variants = {IDEAL: Variant(file="alone"), IDEAL_KEPT: Variant(file="alone", kept=True)}
        self.variants |= {name: PEERS[name] for name in given.peers}
        parts = [part for plan in given.plans for part in (*(stages(plan) or ())[:2], link_table.undelayed(plan))]
        self.variants |= {plan: Variant(file="ours", word=plan) for plan in (*given.plans, *parts)}
        blank: dict[str, Any] = {"failed": "", "curves": {}, "seeds": {}}
        steps = {name: learned["variants"].get(SAME_STEPS.get(name, name), blank) for name in self.variants}
        self.stored: dict[str, Any] = {
            "origin": origin(),
            "steps of": learned["origin"],
            "setting": vars(self.setting),
            "target": learned["target"],
            "at_most": learned["at_most"],
            "rates": given.rates,
            "rounds": [1, 2] if given.quick else [given.search, given.rounds],
            "variants": {
                name: {"word": variant.word, "ours": variant.file == "ours", **steps[name]}
                | asdict(Timing.of(given.rates, failed=steps[name]["failed"]))
                for name, variant in self.variants.items()
            },
            "confirmed": [],
        }

    def write(self) -> None:
        self.out.parent.mkdir(exist_ok=True)
        self.out.write_text(json.dumps(self.stored, indent=1) + "\n")

    def time(self, bed: Bed) -> None:
        """The seconds of a step of every variant that did not refuse; more rounds of the best."""
        search, rounds = self.stored["rounds"]
        if search:
            self._time(bed, list(self.variants), search)
        self._time(bed, self.best() if search else list(self.variants), rounds)

    def best(self) -> list[str]:
        """Those that others are compared with, and the soonest at each rate."""
        found = dict.fromkeys(BASES)
        for rate in self.stored["rates"]:
            for ours in (True, False):
                found |= dict.fromkeys(link_table.soonest(self.stored, rate, ours=ours)[:BEST])
        return list(found)

    def _time(self, bed: Bed, names: list[str], num_rounds: int) -> None:
        names = [part for name in names for part in (stages(self.variants[name].word) or (name, name))[:2]]
        names += [link_table.undelayed(name) for name in names]
        found = self.stored["variants"]
        there = {name: self.variants[name] for name in dict.fromkeys(names) if not found[name]["failed"]}
        timings = Turns(bed, there, self.setting, self.stored["rates"]).take(num_rounds)
        for name, timing in timings.items():
            one = self.stored["variants"][name]
            one["failed"] = timing.failed
            for kind in ("seconds", "relative", "bytes_sent", "exchange"):
                for rate, values in getattr(timing, kind).items():
                    one[kind][rate] += values
        link_table.mix(self.stored)
        self.write()

    def confirm(self, bed: Bed) -> None:
        """The soonest of ours and of the peers at each rate, as a whole."""
        rows = link_table.summary(self.stored)
        for rate in self.stored["rates"]:
            for ours in (True, False):
                if not (names := link_table.soonest(self.stored, rate, ours=ours)):
                    continue
                name = names[0]
                row, variant = rows[name], self.variants[name]
                every = period(variant.word)
                at = {"rate": rate, "num_steps": every * math.ceil(row["steps"] / every)}
                try:
                    whole = confirm(bed, name, variant, self.setting, row["learning_rate"], **at)
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
        run.time(bed)
        if given.confirm:
            run.confirm(bed)
    run.stored["table"] = link_table.summary(run.stored)
    run.stored["ratios"] = {rate: link_table.ratios(run.stored, rate) for rate in run.stored["rates"]}
    run.write()
    print(link_table.markdown(run.stored))


if __name__ == "__main__":
    main()
