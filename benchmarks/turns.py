"""What a step of each variant takes at a rate: turns of all variants beside each other, on the two hosts of a bed.

In every round each variant has one turn, in a new order, while the others sleep on their pipes. A turn of one that
exchanges now and then is `SHORT` steps of the same with `every=SHORT`: it has exactly one exchange, and its first
`ORDINARY` steps, told by the ranks, have none; a round under `delay` ends with the turn. A step of it takes the median
ordinary step, and its part of what the turn took beyond ordinary steps. So variants that differ in their period alone
(or in what changes no time: momentum, learning rates) have their turns in common.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.conductor import RankError, Ranks, Setting, grouped
from benchmarks.links import SECONDS_TURN, WORLD, delay, period, start
from benchmarks.peers import IDEAL, Variant
from tests.bed import Bed

SHORT, ORDINARY, WARMUP = 8, 3, 3
ROUNDS_A_LIFE = 4
LEARNING_RATE = 1e-4  # of no matter here


@dataclass(kw_only=True)
class Timing:
    """What a step of a variant takes."""

    seconds: dict[str, list[float]]
    """Rate -> seconds a step, one value a round."""
    relative: dict[str, list[float]]
    """Rate -> the same as times no exchange in the same round."""
    bytes_sent: dict[str, list[float]]
    """Rate -> bytes a step and rank, by the interfaces' counters, one value a round."""
    exchange: dict[str, list[float]]
    """Rate -> what one exchange takes beyond ordinary steps, as times no exchange; 0 where every step has one."""
    failed: str = ""
    """Why it gave nothing, or stopped."""

    @classmethod
    def of(cls, rates: Sequence[str], failed: str = "") -> Timing:
        """Nothing yet."""
        nothing: list[dict[str, list[float]]] = [{rate: [] for rate in rates} for _ in range(4)]
        return cls(seconds=nothing[0], relative=nothing[1], bytes_sent=nothing[2], exchange=nothing[3], failed=failed)


def shortened(variant: Variant) -> Variant:
    """The same with an exchange in every turn."""
    return replace(variant, word=re.sub(r"\bevery=\d+", f"every={SHORT}", variant.word))


def costs(variant: Variant) -> tuple[str, str, bool]:
    """What a variant's turns hang on: all that have the same take their turns together."""
    word = re.sub(r"(,?lr=[0-9.]+|,?\bmomentum=[0-9.]+|\bouter=[0-9.]+)", "", shortened(variant).word)
    return variant.file, word, variant.kept


def seconds_of(seconds: float, told: Sequence[Sequence[float]], every: int) -> tuple[float, float]:
    """What a step takes on average, and an exchange, from the seconds of a turn and of each rank's steps in it."""
    num_steps = len(told[0])
    if every == 1:
        return seconds / num_steps, 0.0
    ordinary = statistics.fmean(statistics.median(steps[:ORDINARY]) for steps in told)
    exchange = seconds - num_steps * ordinary
    return ordinary + exchange / every, exchange


class Turns:
    """All variants, and what their turns took so far."""

    def __init__(self, bed: Bed, variants: dict[str, Variant], setting: Setting, rates: Sequence[str]) -> None:
        self.bed, self.variants, self.setting, self.rates = bed, variants, setting, rates
        self.timings = {name: Timing.of(rates) for name in variants}
        self.alike: dict[tuple[str, str, bool], list[str]] = {}
        for name, variant in variants.items():
            self.alike.setdefault(costs(variant), []).append(name)
        self.shuffled = random.Random(0)

    def take(self, num_rounds: int) -> dict[str, Timing]:
        """So many rounds at each rate, in groups that fit into memory, each with no exchange and torch DDP.

        All processes start anew every `ROUNDS_A_LIFE` rounds: where a process's memory lies makes it faster or slower.
        """
        paired, groups = grouped([names[0] for names in self.alike.values()], WORLD, self.setting)
        if not paired:
            given = f"{len(self.variants)} variants, of which not even three fit into the free memory"
            raise SystemExit(
                f"{given}\n  needed: no exchange, torch DDP and one more at a time\n  do: free some memory"
            )
        for group in groups:
            for begun in range(0, num_rounds, ROUNDS_A_LIFE):
                names = [name for name in group if not self.timings[name].failed]
                self._life(names, min(ROUNDS_A_LIFE, num_rounds - begun))
        return self.timings

    def _life(self, names: Sequence[str], num_rounds: int) -> None:
        """Rounds from the start of all processes to their end."""
        self.bed.rate(None)
        there: dict[str, Ranks] = {}
        try:
            for name in names:
                self._begin(there, name)
            for rate in self.rates:
                self.bed.rate(rate)
                self._round(there)  # not counted: connections find out about the rate
                for _ in range(num_rounds):
                    self._note(rate, self._round(there))
        finally:
            for ranks in there.values():
                ranks.end()

    def _begin(self, there: dict[str, Ranks], name: str) -> None:
        variant = self.variants[name]
        try:
            there[name], _ = start(self.bed, name, shortened(variant), self.setting, LEARNING_RATE)
            warm_up = SHORT + delay(variant.word) if period(variant.word) > 1 else WARMUP
            there[name].ask({"steps": warm_up}, SECONDS_TURN)
        except RankError as error:
            self._fail(there, name, error)

    def _round(self, there: dict[str, Ranks]) -> dict[str, tuple[float, float, float]]:
        """A turn of every variant; seconds a step, of an exchange, and bytes a step of those that came through."""
        took: dict[str, tuple[float, float, float]] = {}
        for name in self.shuffled.sample(list(there), len(there)):
            once = period(self.variants[name].word) == 1
            before, began = self._sent(), time.perf_counter()
            try:
                said = there[name].ask({"steps": self.setting.steps if once else SHORT}, SECONDS_TURN)
            except RankError as error:
                self._fail(there, name, error)
                continue
            seconds, sent = time.perf_counter() - began, self._sent() - before
            for other in self.alike[costs(self.variants[name])]:
                every = period(self.variants[other].word)
                part = self.setting.steps if once else every  # a turn has one exchange
                took[other] = *seconds_of(seconds, [one["seconds"] for one in said], every), sent / part
        if IDEAL not in took:
            raise RuntimeError(f"no exchange, which all are compared with, has failed: {self.timings[IDEAL].failed}")
        return took

    def _sent(self) -> float:
        return statistics.fmean(self.bed.bytes_sent(host) for host in range(WORLD))

    def _note(self, rate: str, took: dict[str, tuple[float, float, float]]) -> None:
        print(f"  {rate}: " + ", ".join(f"{name} {1e3 * s:.0f} ms" for name, (s, *_) in took.items()), flush=True)
        for name, (seconds, exchange, sent) in took.items():
            self.timings[name].seconds[rate].append(seconds)
            self.timings[name].relative[rate].append(seconds / took[IDEAL][0])
            self.timings[name].bytes_sent[rate].append(sent)
            self.timings[name].exchange[rate].append(exchange / took[IDEAL][0])

    def _fail(self, there: dict[str, Ranks], name: str, error: RankError) -> None:
        for other in self.alike[costs(self.variants[name])]:
            self.timings[other].failed = str(error)
        if name in there:
            there.pop(name).end()
