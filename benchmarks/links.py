"""One rank on each of two hosts, and a link between them: starting a variant there, and what it learns per step.

A variant's processes are those of `conductor.Ranks`, one on each host of a bed (tests/bed.py). Variants whose word has
`every=` exchange once in so many steps.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.conductor import SECONDS_START, RankError, Ranks, Setting, environ_of, environment
from benchmarks.peers import Variant
from tests.bed import INTERFACE, Bed

WORLD = 2
EVALUATED_EVERY, HELD_OUT_ROWS = 5, 16
RECIPE = {"warm_up": 20, "clip": 1.0, "beta": 0.95}
"""What GPTs are usually trained with: steps over which learning rates grow, the norm that gradients are clipped to, and
AdamW's second beta. Without these a run is led by chance where the loss leaves its first plateau: int8 took 169 and 190
steps to one target, by two sources that differ in rounding. With them noise of 1% in all gradients changes no loss of
100 steps by 0.01, and rates of 5e-4 and 1e-3 learn equally fast."""
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What dt.distribute tells malloc on ranks that compute on the processor."""
SECONDS_TURN = 600
_ports = itertools.count(20_000)
"""Below those that the kernel gives to clients."""


@dataclass(frozen=True)
class Loopback:
    """Two ranks on this host, on its processor or sharing a GPU: for what is learned in a step, not for its time."""

    device: str = "cpu"

    def command(self, host: int, *words: object) -> list[str]:
        return [str(word) for word in words]

    def address(self, host: int) -> str:
        return "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every variant is to learn."""

    setting: Setting
    """The model, and the rows of a rank."""
    target: float
    """The held-out loss to be reached."""
    at_most: int
    """Steps after which a variant has not reached it."""


@dataclass(kw_only=True)
class Curve:
    """What a variant learned at one learning rate."""

    points: list[tuple[int, float]] = field(default_factory=list)
    """Steps taken, and the held-out loss then."""
    steps: float | None = None
    """Steps to the target; None: not reached."""
    versions: dict[str, str] = field(default_factory=dict)
    """Libraries that took part, told by the ranks."""


def ports_from(first: int) -> None:
    """Two benchmarks at once need ports of their own."""
    global _ports
    _ports = itertools.count(first)


def period(word: str) -> int:
    """Steps from exchange to exchange."""
    found = re.search(r"\bevery=(\d+)", word)
    return int(found[1]) if found else 1


def delay(word: str) -> int:
    """Of a plan of ours: for how many steps a round travels beside them."""
    found = re.search(r"\),delay=(\d+)", word)
    return int(found[1]) if found else 0


def evaluated(word: str) -> tuple[int, bool]:
    """After how many steps a variant is evaluated, each time, and whether points are then taken with their neighbours.

    After an exchange where one comes now and then; `delay` is evaluated by the mean of replicas, so at any step.
    """
    often = period(word) == 1 or (delay(word) > 0 and period(word) < EVALUATED_EVERY)
    return (EVALUATED_EVERY, True) if often else (period(word), False)


def stages(word: str) -> tuple[str, str, int] | None:
    """Of a plan that begins as ddp: what it is at first, what then, and after how many steps."""
    found = re.fullmatch(r"local\((every=\d+),after=(\d+)\)(.*)", word)
    return (f"ddp{found[3]}", f"local({found[1]}){found[3]}", int(found[2])) if found else None


def start(
    bed: Bed | Loopback, name: str, variant: Variant, setting: Setting, learning_rate: float, *, seed: int = 0
) -> tuple[Ranks, dict[str, str]]:
    """Build a variant, one rank on each host; give its processes and the versions they have.

    Raises:
        RankError: It refuses, ends or does not answer.
    """
    port, here = next(_ports), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": bed.address(0)}
    here |= {"BENCHMARK_LEARNING_RATE": str(learning_rate), "BENCHMARK_SEED": str(seed)}
    here |= {f"BENCHMARK_{name.upper()}": str(value) for name, value in RECIPE.items()}
    here |= KEPT if variant.kept else {}
    if isinstance(bed, Loopback):
        home = variant.home if bed.device == "cpu" else ""  # with a GPU one environment has everything
        here |= {"GLOO_SOCKET_IFNAME": "lo", "BENCHMARK_DEVICE": bed.device}
        del here["LOCAL_RANK"], here["LOCAL_WORLD_SIZE"]
    else:
        home, here = variant.home, {**here, "GLOO_SOCKET_IFNAME": INTERFACE}
    command = [environment(home), "-m", "benchmarks.peers.learner"]
    environs = [environ_of(home, rank, WORLD, port) | here for rank in range(WORLD)]
    ranks = Ranks(
        f"{name} {learning_rate:g} {seed}",
        [(bed.command(rank, *command), environ) for rank, environ in enumerate(environs)],
    )
    try:
        first = {"file": variant.file, "word": variant.word, "model": setting.model, "batch": setting.batch}
        said = ranks.ask(first, SECONDS_START)
        if refused := [one["refused"] for one in said if "refused" in one]:
            raise RankError(f"refused: {refused[0]}")
    except RankError:
        ranks.end()
        raise
    return ranks, said[0]["versions"]


def held_out_loss(ranks: Ranks) -> float:
    """The mean over all held-out rows, each rank its part of them."""
    return statistics.fmean(one["loss"] for one in ranks.ask({"evaluate": HELD_OUT_ROWS}, SECONDS_TURN))


def learn(
    bed: Bed | Loopback, name: str, variant: Variant, task: Task, learning_rate: float, *, seed: int = 0
) -> Curve:
    """Train from the start until the target is reached; evaluate in between.

    A variant that exchanges now and then is evaluated after each exchange only, when its ranks have one model. It may
    reach the target in between: one more exchange is counted then (link_table).

    Raises:
        RankError: It refuses, ends or does not answer.
    """
    stretch, smooth = evaluated(variant.word)
    ranks, versions = start(bed, name, variant, task.setting, learning_rate, seed=seed)
    curve = Curve(versions=versions)
    try:
        for taken in range(stretch, task.at_most + 1, stretch):
            ranks.ask({"steps": stretch}, SECONDS_TURN)
            curve.points.append((taken, held_out_loss(ranks)))
            curve.steps = reached(curve.points, task.target, smooth=smooth)
            if curve.steps is not None or not math.isfinite(curve.points[-1][1]):
                break
    finally:
        ranks.end()
    return curve


def reached(points: Sequence[tuple[int, float]], target: float, *, smooth: bool) -> float | None:
    """The steps at which a curve comes down to the target, by a straight line between two points.

    Smooth: of the mean of each point with its neighbours. Otherwise of the points themselves: so few have little noise.
    """
    if smooth:
        means = [statistics.fmean(loss for _, loss in points[max(0, k - 1) : k + 2]) for k in range(len(points) - 1)]
    else:
        means = [loss for _, loss in points]
    for k, mean in enumerate(means):
        if mean <= target:
            step, before = points[k][0], max(0, k - 1)
            part = (means[before] - target) / (means[before] - mean) if k else 1.0
            return points[before][0] + part * (step - points[before][0])
    return None


def confirm(
    bed: Bed, name: str, variant: Variant, setting: Setting, learning_rate: float, *, rate: str, num_steps: int
) -> dict[str, Any]:
    """Train from the start at a rate for so many steps: the seconds of the whole, and the held-out loss after it.

    Raises:
        RankError: It refuses, ends or does not answer.
    """
    bed.rate(None)
    ranks, _ = start(bed, name, variant, setting, learning_rate)
    try:
        bed.rate(rate)
        began = time.perf_counter()
        ranks.ask({"steps": num_steps}, num_steps * SECONDS_TURN)
        seconds = time.perf_counter() - began
        bed.rate(None)
        return {"variant": name, "rate": rate, "steps": num_steps, "seconds": seconds, "loss": held_out_loss(ranks)}
    finally:
        ranks.end()
