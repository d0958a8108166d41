"""What is made of a stored run of benchmarks/slow_link.py: steps, bytes, times and ratios, and tables of them.

Seconds to the target are steps x (times no exchange) x (what a step without exchange takes), because times no exchange
are measured within rounds. Where a variant reaches the target between two exchanges, all of the next one is counted.
Steps are means over seeds; intervals are by resampling rounds, and seeds in pairs (what is counted of a last exchange
does not vary in them).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.links import period, stages
from benchmarks.peers import IDEAL
from benchmarks.step_time import interval

RESAMPLES = 2000


def quotient(a: Sequence[float], b: Sequence[float], steps: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The quotient of two medians times that of steps summed over seeds, and its 95% interval, by resampling both."""
    draw = random.Random(1)
    found = sorted(
        median(draw.choices(a, k=len(a))) / median(draw.choices(b, k=len(b))) * _over(draw.choices(steps, k=len(steps)))
        for _ in range(RESAMPLES)
    )
    return median(a) / median(b) * _over(steps), found[RESAMPLES // 40], found[-RESAMPLES // 40 - 1]


def _over(steps: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in steps) / sum(other for _, other in steps)


def steps_of(one: dict[str, Any]) -> list[float]:
    """Steps to the target at a variant's best learning rate, by seed; empty where one did not reach it."""
    if not (found := best_curve(one)):
        return []
    steps = [found[1]["steps"], *(one["seeds"][seed] for seed in sorted(one["seeds"]))]
    return [] if None in steps else steps


def charged(one: dict[str, Any], rate: str) -> list[float]:
    """The same as so many average steps of it, with the whole of the last exchange.

    Under `delay` that is one with which all come together: one that nobody steps beside.
    """
    every, relative, exchange = period(one["word"]), median(one["relative"][rate]), median(one["exchange"][rate])
    if last := one.get("last"):
        return [n + median(last[rate]) / relative for n in steps_of(one)]
    return [n + (math.ceil(n / every) - n / every) * exchange / relative for n in steps_of(one)]


def best_curve(one: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """A variant's learning rate with the fewest steps, and the curve there; None where it has no curve."""
    curves = one.get("curves") or {}
    if not curves:
        return None
    return min(curves.items(), key=lambda item: (item[1]["steps"] is None, item[1]["steps"] or _lowest(item[1])))


def _lowest(curve: dict[str, Any]) -> float:
    return min((loss for _, loss in curve["points"]), default=float("inf"))


def undelayed(name: str) -> str:
    """A plan of ours, whose rounds end when they are begun."""
    return re.sub(r"\),delay=\d+", ")", name)


def mix(stored: dict[str, Any]) -> None:
    """What follows from other variants: of plans that begin as ddp, both parts by their steps; last exchanges."""
    variants = stored["variants"]
    for name, one in variants.items():
        if (at_once := undelayed(name)) != name:
            one["last"] = variants[at_once]["exchange"]
        steps = steps_of(one)
        if not steps or not (found := stages(one["word"])):
            continue
        first, then, after = found
        part = min(1.0, after / fmean(steps))
        one["exchange"] = variants[then if part < 1.0 else first]["exchange"]  # the last one is a whole one
        for kind in ("seconds", "relative", "bytes_sent"):
            for rate in stored["rates"]:
                both = zip(variants[first][kind][rate], variants[then][kind][rate], strict=True)
                one[kind][rate] = [part * a + (1 - part) * b for a, b in both]


def summary(stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Variant -> its row, for those that did not fail."""
    variants, rows = stored["variants"], {}
    for name, one in variants.items():
        if one["failed"]:
            continue
        row: dict[str, Any] = {"rates": {}}
        if found := best_curve(one):
            rate, curve = found
            steps = steps_of(one)
            row |= {"learning_rate": float(rate), "steps": fmean(steps) if steps else None, "lowest": _lowest(curve)}
        sent = [value for values in one["bytes_sent"].values() for value in values]
        row["bytes_a_step"] = round(median(sent)) if sent else None
        for rate, relative in one["relative"].items():
            if relative:
                row["rates"][rate] = _at_rate(variants, one, rate, relative)
        rows[name] = row
    return rows


def _at_rate(variants: dict[str, Any], one: dict[str, Any], rate: str, relative: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"ms": [round(1e3 * v, 1) for v in interval(one["seconds"][rate])]}
    found["to no exchange"] = [round(v, 3) for v in interval(relative)]
    if steps := charged(one, rate):
        found["seconds to target"] = round(
            fmean(steps) * median(relative) * median(variants[IDEAL]["seconds"][rate]), 1
        )
    return found


def ratios(stored: dict[str, Any], rate: str) -> dict[str, dict[str, list[float]]]:
    """Plan of ours -> peer -> seconds to target of ours as times the peer's, with its interval."""
    variants, rows = stored["variants"], summary(stored)
    there = [name for name, row in rows.items() if row.get("steps") is not None]
    peers = [name for name in there if not variants[name]["ours"]]
    found: dict[str, dict[str, list[float]]] = {}
    for plan in (name for name in there if variants[name]["ours"]):
        for peer in peers:
            if not (rate in rows[plan]["rates"] and rate in rows[peer]["rates"]):
                continue
            steps = list(zip(charged(variants[plan], rate), charged(variants[peer], rate), strict=True))
            times = quotient(variants[plan]["relative"][rate], variants[peer]["relative"][rate], steps)
            found.setdefault(plan, {})[peer] = [round(v, 3) for v in times]
    return found


def soonest(stored: dict[str, Any], rate: str, *, ours: bool) -> list[str]:
    """The variants, of ours or of the peers, that reach the target, the soonest first."""
    rows = {name: row for name, row in summary(stored).items() if stored["variants"][name]["ours"] == ours}
    seconds = {name: row["rates"].get(rate, {}).get("seconds to target") for name, row in rows.items()}
    return sorted((name for name, value in seconds.items() if value is not None), key=lambda name: seconds[name])


def markdown(stored: dict[str, Any]) -> str:
    """The rows of all variants, and for each rate ours beside each peer."""
    rates, rows = stored["rates"], summary(stored)
    head = ["", "steps to target", "MB sent a step and rank"]
    for rate in rates:
        head += [f"{rate}: ms a step", "times no exchange", "s to target"]
    lines = [_line(head), "|---" * len(head) + "|"]
    for name, one in stored["variants"].items():
        shown = f"**{name}**" if one["ours"] else name
        lines.append(_line([shown, one["failed"]]) if one["failed"] else _line([shown, *_cells(stored, rows[name])]))
    for rate in rates:
        lines += ["", f"Seconds to the target at {rate}, as times each peer's:", "", *_beside(ratios(stored, rate))]
    for one in stored["confirmed"]:
        said = one.get("failed") or f"{one['steps']} steps in {one['seconds']:.0f} s, held-out loss {one['loss']:.3f}"
        lines += ["", f"Run as a whole at {one['rate']}: {one['variant']}, {said}."]
    return "\n".join(lines)


def _cells(stored: dict[str, Any], row: dict[str, Any]) -> list[str]:
    cells = ["", f"{(row['bytes_a_step'] or 0) / 1e6:.2f}"]
    if "steps" in row:
        reached = f"{row['steps']:.0f}" if row["steps"] else f"not in {stored['at_most']} (lowest {row['lowest']:.2f})"
        cells[0] = f"{reached} at {row['learning_rate']:g}"
    for rate in stored["rates"]:
        at = row["rates"].get(rate)
        cells += (
            ["", "", ""]
            if at is None
            else [_range(at["ms"], 0), _range(at["to no exchange"], 2), str(at.get("seconds to target", ""))]
        )
    return cells


def _beside(found: dict[str, dict[str, list[float]]]) -> list[str]:
    if not found:
        return ["Nothing of ours and of the peers has reached it."]
    peers = list(next(iter(found.values())))
    lines = [_line(["", *peers]), "|---" * (len(peers) + 1) + "|"]
    return lines + [_line([f"**{plan}**", *(_range(row[peer], 2) for peer in peers)]) for plan, row in found.items()]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _range(values: Sequence[float], digits: int) -> str:
    middle, low, high = (f"{v:.{digits}f}" for v in values)
    return f"{middle} ({low}–{high})"  # noqa: RUF001 - a range in print
