"""The outcome of `verify`: same or not, how far from it, and why."""

from __future__ import annotations

from dataclasses import dataclass

from distributedtorch.verify.compare import Row, Runs, losses, states
from distributedtorch.verify.reasons import Fault, find

_WORST = 10


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a plan gives the result of one process, measured. True in a condition when it does."""

    title: str
    """What was compared: script, plan, workers, steps."""
    steps: int
    """Optimizer steps compared."""
    parameters: tuple[Row, ...]
    """Every parameter and buffer after the last step, the most suspect first."""
    loss: Row | None
    """The loss that differs most."""
    fault: Fault | None
    """The first difference beyond rounding; None: the same result."""
    notes: tuple[str, ...]
    """What was done to make the runs comparable, and what to know about the comparison."""

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than rounding explains."""
        return self.fault is None

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        lines = [self.title, *_plain([HEAD, *self.table()]), *self.lines()]
        return "\n".join(lines)

    def table(self) -> list[tuple[str, ...]]:
        """The loss and the worst parameters, as texts."""
        shown = [row for row in (self.loss, *self.parameters[:_WORST]) if row is not None]
        return [_cells(row) for row in shown]

    def lines(self) -> list[str]:
        """What stands under the table; the verdict is the last line but for what explains it."""
        rest = len(self.parameters) - _WORST
        said = [f"and {rest} more parameters and buffers below these"] if rest > 0 else []
        said += self.notes
        if self.fault is None:
            return [*said, f"same result: {self.steps} steps, every difference within rounding"]
        at = f"step {self.fault.step}" if self.fault.step else "the start"
        said.append(f"differs: first at {at}, {self.fault.what}")
        said += [f"  found: {text}" for text in self.fault.evidence]
        said += [f"  likely: {self.fault.reasons[0]}"]
        return said + [f"  or: {reason}" for reason in self.fault.reasons[1:]]


HEAD = ("", "difference", "noise", "allowed", "")


def judge(runs: Runs, title: str, asked: int) -> Verdict:
    """Compare three runs that have each taken a step."""
    steps = runs.steps
    found = [row for rows in losses(runs) for row in rows]
    return Verdict(
        title=title,
        steps=steps,
        parameters=tuple(states(runs, steps)),
        loss=max(found, key=lambda row: (row.excess, row.difference), default=None),
        fault=find(runs),
        notes=tuple(_notes(runs, asked)),
    )


def _notes(runs: Runs, asked: int) -> list[str]:
    said = []
    if runs.truth.quiet:
        said.append(f"dropout set to 0 in all runs: {_some(runs.truth.quiet)}")
    if len(runs.truth.steps) < asked:
        said.append(f"the script ended by itself after {len(runs.truth.steps)} of {asked} steps")
    if runs.plan.world > 1 and not any(step.rows for step in runs.plan.steps):
        said.append(f"no loader was given: every rank computed whole batches, {runs.plan.world} times the work of one")
    by_rounding = [row.name for row in states(runs, runs.steps) if not row.judged]
    if by_rounding:
        said.append(f"not judged, moved by rounding alone (a gradient of zero): {_some(by_rounding)}")
    return said


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _cells(row: Row) -> tuple[str, ...]:
    mark = "differs" if row.beyond else "" if row.judged else "not judged"
    return row.name, *(f"{value:.1e}" for value in (row.difference, row.noise, row.allowed)), mark


def _plain(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
    return [_spread(row, widths) for row in rows]


def _spread(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return "  ".join(cells).rstrip()
