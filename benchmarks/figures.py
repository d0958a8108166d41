"""What is made of stored rounds: tables with intervals, the picture, and the part of README between two marks.

`python -m benchmarks.figures` writes README's figures from benchmarks/results/bench.json; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers import BASES, IDEAL
from benchmarks.step_time import interval

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/results/bench.json"
BEGIN, END = "<!-- figures: python -m benchmarks.figures -->", "<!-- end of figures -->"
SETTINGS = ("work", "small")
OURS = ("ddp", "zero1", "zero2", "zero3")


def table(seconds: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """Variant -> median and 95% interval of milliseconds a step, and of the ratios to the bases within rounds."""
    rows = {}
    for name, values in seconds.items():
        row = {"ms": [round(1e3 * v, 2) for v in interval(values)]}
        for base in BASES:
            if base in seconds:
                ratios = [a / b for a, b in zip(values, seconds[base], strict=True)]
                row[f"to {base}"] = [round(v, 3) for v in interval(ratios)]
        rows[name] = row
    return rows


def markdown(stored: dict[str, Any]) -> str:
    """Every setting that is stored, as README shows it."""
    parts = [_setting(stored[name]) for name in SETTINGS if name in stored]
    if "growth" in stored:
        parts.append(_growth(stored["growth"]))
    return "\n\n".join(parts) or "Nothing is stored yet: `make bench` measures."


def _title(one: dict[str, Any]) -> str:
    setting = one["setting"]
    tokens = f"{setting['batch']} x {setting['model']['length']} tokens a rank"
    return f"{setting['parameters'] / 1e6:.0f}M parameters, {tokens}, {one['ranks']} ranks"


def _setting(one: dict[str, Any]) -> str:
    lines = [f"{_title(one)}, {one['rounds']} rounds, {_where(one['origin'])}:", ""]
    lines += ["| | ms a step | times no exchange | times torch DDP |", "|---|---|---|---|"]
    for name, facts in one["variants"].items():
        shown = f"**{name}**" if name in OURS else name
        if facts["failed"]:
            lines.append(f"| {shown} | failed: {facts['failed']} | | |")
            continue
        row = one["table"][name]
        ratios = (_range(row[f"to {base}"], 2) if f"to {base}" in row else "" for base in BASES)
        lines.append(f"| {shown} | {_range(row['ms'], 0)} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _growth(cells: list[dict[str, Any]]) -> str:
    """Rows are sizes, columns numbers of ranks; in each cell what exchange makes of a step."""
    sizes, ranks = list(dict.fromkeys(c["size"] for c in cells)), sorted({c["ranks"] for c in cells})
    cores = cells[0]["origin"]["cores"]
    lines = [f"How cost grows, as times no exchange at the same ranks ({cores} cores; ddp / torch DDP):", ""]
    lines += [
        "| parameters | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in ranks) + " |",
        "|---" * len(ranks) + "|---|",
    ]
    for size in sizes:
        found = {c["ranks"]: c for c in cells if c["size"] == size}
        lines.append(f"| {size} | " + " | ".join(_cell(found[n]) if n in found else "" for n in ranks) + " |")
    if alone := [f"{c['size']} at {c['ranks']}" for c in cells if not c["paired"]]:
        lines += ["", f"Measured one variant after the other, because together they do not fit: {', '.join(alone)}."]
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    shown = []
    for name in ("ddp", "torch DDP"):
        row = cell["table"].get(name, {})
        shown.append(_range(row[f"to {IDEAL}"], 2) if f"to {IDEAL}" in row else "failed")
    return " / ".join(shown)


def _range(values: list[float], digits: int) -> str:
    middle, low, high = (f"{v:.{digits}f}" for v in values)
    return f"{middle} ({low}–{high})"  # noqa: RUF001 - a range in print


def _where(origin: dict[str, Any]) -> str:
    return f"{origin['cores']} cores of {origin['processor']}, torch {origin['torch']}, commit {origin['commit']}"


def picture(stored: dict[str, Any], path: Path) -> None:
    """Bars of what exchange costs in every variant, and its growth with ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [name for name in SETTINGS if name in stored and IDEAL in stored[name]["table"]]
    panels = len(bars) + ("growth" in stored)
    if not panels:
        return
    figure, axes = pyplot.subplots(1, panels, figsize=(6 * panels, 5), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], bars, strict=False):
        rows = {k: row[f"to {IDEAL}"] for k, row in stored[name]["table"].items() if k != IDEAL}
        rows = dict(sorted(rows.items(), key=lambda item: -item[1][0]))
        spread = [[m - low for m, low, _ in rows.values()], [high - m for m, _, high in rows.values()]]
        colours = ["tab:blue" if k in OURS else "tab:gray" for k in rows]
        axis.barh(list(rows), [v[0] for v in rows.values()], xerr=spread, color=colours)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=_title(stored[name]), xlabel="times no exchange (95% intervals)")
    if "growth" in stored:
        _lines(axes[0][-1], stored["growth"])
    figure.savefig(path, dpi=110)


def _lines(axis: Any, cells: list[dict[str, Any]]) -> None:
    colours = dict(zip(dict.fromkeys(c["size"] for c in cells), ("tab:green", "tab:orange", "tab:red"), strict=False))
    for size, colour in colours.items():
        for name, style in (("ddp", "-"), ("torch DDP", "--")):
            points = [
                (c["ranks"], *c["table"][name][f"to {IDEAL}"])
                for c in cells
                if c["size"] == size and name in c["table"]
            ]
            if not points:
                continue
            ranks, middle, low, high = zip(*points, strict=True)
            axis.plot(ranks, middle, style, color=colour, marker="o", label=f"{name}, {size}")
            axis.fill_between(ranks, low, high, color=colour, alpha=0.15)
    axis.set(title="growth", xlabel="ranks", ylabel="times no exchange", xscale="log")
    axis.set_xticks(sorted({c["ranks"] for c in cells}), labels=[str(n) for n in sorted({c["ranks"] for c in cells})])
    axis.minorticks_off()
    axis.legend()


def with_figures(readme: str, stored: dict[str, Any]) -> str:
    """README's text with its figures made anew."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown(stored)}\n{END}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    readme.write_text(with_figures(readme.read_text(), stored))


if __name__ == "__main__":
    main()
