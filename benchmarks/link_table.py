"""What is made of a stored run of benchmarks/slow_link.py: steps, bytes, times and ratios, and tables of them.

Seconds to the target are steps x (times no exchange) x (what a step without exchange takes), because times no exchange
are measured within rounds. Intervals are of the times only: the steps come from one run with one seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.peers import IDEAL
from benchmarks.step_time import interval

RESAMPLES = 2000


def quotient(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The quotient of two medians and its 95% interval, by resampling both."""
    draw = random.Random(1)
    found = sorted(median(draw.choices(a, k=len(a))) / median(draw.choices(b, k=len(b))) for _ in range(RESAMPLES))
    return median(a) / median(b), found[RESAMPLES // 40], found[-RESAMPLES // 40 - 1]


def best_curve(one: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """A variant's learning rate with the fewest steps, and the curve there; None where it has no curve."""
    curves = one.get("curves") or {}
    if not curves:
        return None
    return min(curves.items(), key=lambda item: (item[1]["steps"] is None, item[1]["steps"] or _lowest(item[1])))


def _lowest(curve: dict[str, Any]) -> float:
    return min((loss for _, loss in curve["points"]), default=float("inf"))


def summary(stored: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Variant -> its row, for those that did not fail."""
    variants, rows = stored["variants"], {}
    for name, one in variants.items():
        if one["failed"]:
            continue
        row: dict[str, Any] = {"rates": {}}
        if found := best_curve(one):
            rate, curve = found
            row |= {"learning_rate": float(rate), "steps": curve["steps"], "lowest": _lowest(curve)}
            row["bytes_a_step"] = round(median(curve["bytes_sent"])) if curve["bytes_sent"] else None
        for rate, relative in one["relative"].items():
            row["rates"][rate] = _at_rate(variants, one, rate, row.get("steps"), relative)
        rows[name] = row
    return rows


def _at_rate(
    variants: dict[str, Any], one: dict[str, Any], rate: str, steps: float | None, relative: list[float]
) -> dict[str, Any]:
    found: dict[str, Any] = {"ms": [round(1e3 * v, 1) for v in interval(one["seconds"][rate])]}
    found["to no exchange"] = [round(v, 3) for v in interval(relative)]
    if steps is not None:
        found["seconds to target"] = round(steps * median(relative) * median(variants[IDEAL]["seconds"][rate]), 1)
    return found


def ratios(stored: dict[str, Any], rate: str) -> dict[str, dict[str, list[float]]]:
    """Plan of ours -> peer -> seconds to target of ours as times the peer's, with its interval."""
    variants, rows = stored["variants"], summary(stored)
    there = [name for name, row in rows.items() if row.get("steps") is not None]
    peers = [name for name in there if not variants[name]["ours"]]
    found: dict[str, dict[str, list[float]]] = {}
    for plan in (name for name in there if variants[name]["ours"]):
        for peer in peers:
            steps = rows[plan]["steps"] / rows[peer]["steps"]
            times = quotient(variants[plan]["relative"][rate], variants[peer]["relative"][rate])
            found.setdefault(plan, {})[peer] = [round(steps * v, 3) for v in times]
    return found


def fastest(stored: dict[str, Any], rate: str, *, ours: bool) -> str | None:
    """The variant, of ours or of the peers, that is soonest at the target."""
    rows = {name: row for name, row in summary(stored).items() if stored["variants"][name]["ours"] == ours}
    seconds = {name: row["rates"][rate].get("seconds to target") for name, row in rows.items()}
    there = {name: value for name, value in seconds.items() if value is not None}
    return min(there, key=lambda name: there[name]) if there else None


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
    cells = ["", ""]
    if "steps" in row:
        reached = f"{row['steps']:.0f}" if row["steps"] else f"not in {stored['at_most']} (lowest {row['lowest']:.2f})"
        cells = [f"{reached} at {row['learning_rate']:g}", f"{(row['bytes_a_step'] or 0) / 1e6:.2f}"]
    for rate in stored["rates"]:
        at = row["rates"][rate]
        cells += [_range(at["ms"], 0), _range(at["to no exchange"], 2), str(at.get("seconds to target", ""))]
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
