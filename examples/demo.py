"""One process against two workers under ddp, zero1, zero2 and zero3: the same training, a table and a picture.

Every run is a launch of its own of measured.py. Exit code 1 if a plan's result is not that of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

try:
    import matplotlib as mpl
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.table import Table

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
except ModuleNotFoundError as missing:
    name = str(missing.name).partition(".")[0]
    sys.exit(f"{name} is not installed, and the demo needs it: pip install 'distributedtorch[demo]'")

LIMIT = 1e-4
TRUTH, PLANS = "one process", ("ddp", "zero1", "zero2", "zero3")
WORKERS = 2
KINDS = {"parameters": "#4c6a92", "gradients": "#e09f3e", "optimizer": "#4f9d69"}
LINES = {
    "ddp": ("#d1495b", "-"),
    "zero1": ("#2a7f62", (0, (6, 6))),
    "zero2": ("#30497a", (6, (2, 4))),
    "zero3": ("#8a5a9e", (3, (1, 3))),
}
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run left behind."""

    name: str
    losses: list[float]
    """The mean over the global batch, at every step."""
    validation: float
    bytes_kept: dict[str, int]
    """On one rank from step to step, by kind."""
    bytes_sent: float
    """By one rank in one step (median)."""
    seconds: float
    """One step (median)."""
    weights: dict[str, Tensor]


class RunFailed(Exception):
    """A run did not end well; the text is what it said."""


def train(name: str, steps: int, folder: Path, progress: Progress) -> Run:
    """Run measured.py in one process or under a plan, with a live bar."""
    folder.mkdir()
    script = [str(Path(__file__).with_name("measured.py")), "--steps", str(steps), "--folder", str(folder)]
    launch = [] if name == TRUTH else ["-m", "distributedtorch", "run", "--workers", str(WORKERS), "--plan", name]
    task = progress.add_task(name, total=None, loss="starting")
    with (folder / "stderr").open("w+") as stderr:
        with subprocess.Popen(
            [sys.executable, *launch, *script],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process:
            follow(process, steps, progress, task)
        if process.returncode != 0:
            stderr.seek(0)
            raise RunFailed(f"the run {name!r} ended with exit code {process.returncode}:\n{stderr.read()}")
    result = json.loads((folder / "result.json").read_text())
    return Run(name=name, weights=load_file(folder / "weights.safetensors"), **result)


def follow(process: subprocess.Popen[str], steps: int, progress: Progress, task: TaskID) -> None:
    """Move the bar with the lines that rank 0 prints."""
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        progress.update(task, total=steps, completed=said["step"], loss=f"loss {said['loss']:.3f}")


def weights_differ(run: Run, truth: Run) -> float:
    """The largest difference in any tensor, relative to the tensor's largest weight."""
    assert run.weights.keys() == truth.weights.keys()
    pairs = [(run.weights[name].double(), theirs.double()) for name, theirs in truth.weights.items()]
    return torch.stack([(mine - theirs).abs().max() / theirs.abs().max() for mine, theirs in pairs]).max().item()


def losses_differ(run: Run, truth: Run) -> float:
    """The largest relative difference of a loss, at any step or of validation."""
    mine, theirs = (torch.tensor([*r.losses, r.validation], dtype=torch.float64) for r in (run, truth))
    return ((mine - theirs).abs() / theirs).max().item()  # unlike Python's, torch's max keeps a NaN


def faults(truth: Run, runs: list[Run]) -> list[str]:
    """What is not as in one process, in words."""
    found = []
    for run in runs:
        for what, difference in (("weights", weights_differ(run, truth)), ("losses", losses_differ(run, truth))):
            if not difference <= LIMIT:  # a NaN is a fault too
                found.append(f"{run.name}: the {what} differ from one process by {difference:.1e} (limit {LIMIT:.0e})")
    return found


def table(truth: Run, runs: list[Run]) -> Table:
    """One row per run."""
    out = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", caption_justify="left", caption=NOTES)
    out.add_column("plan\n", no_wrap=True)
    heads = ["final\nloss", "validation\nloss", "weights\ndiffer by", "param.\nMiB", "grad.\nMiB", "optim.\nMiB"]
    for head in [*heads, "sent\nMiB", "step\nms"]:
        out.add_column(head, justify="right", no_wrap=True)
    for run in [truth, *runs]:
        kept = [f"{run.bytes_kept[kind] / MIB:.2f}" for kind in KINDS]
        differ = "-" if run is truth else f"{weights_differ(run, truth):.1e}"
        losses = [f"{run.losses[-1]:.4f}", f"{run.validation:.4f}"]
        out.add_row(run.name, *losses, differ, *kept, f"{run.bytes_sent / MIB:.2f}", f"{run.seconds * 1000:.0f}")
    return out


NOTES = (
    f"{WORKERS} workers, float32, one thread per process. MiB of parameters, gradients and optimizer state: kept by "
    "each rank from step to step. Sent: by each rank in each step. Step: median."
)


def picture(truth: Run, runs: list[Run], path: Path) -> None:
    """Losses over each other, memory beside them."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(1.25, 1), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    draw_losses(left, truth, runs)
    draw_memory(right, [truth, *runs])
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(axes: Axes, truth: Run, runs: list[Run]) -> None:
    steps = range(1, len(truth.losses) + 1)
    axes.plot(steps, truth.losses, color="#c9c9c9", linewidth=8, solid_capstyle="round", label=truth.name)
    for run in runs:
        color, dashes = LINES[run.name]
        axes.plot(
            steps, run.losses, color=color, linestyle=dashes, linewidth=1.6, label=f"{run.name}, {WORKERS} workers"
        )
    axes.set(xlabel="step", ylabel="training loss (global batch)")
    largest = torch.tensor([losses_differ(run, truth) for run in runs]).max()
    axes.set_title(f"The same training: losses differ by {largest:.0e} at most", loc="left", fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(edgecolor="none", framealpha=1, handlelength=3.5)


def draw_memory(axes: Axes, runs: list[Run]) -> None:
    names = [run.name for run in runs]
    bottoms = [0.0] * len(runs)
    for kind, color in KINDS.items():
        heights = [run.bytes_kept[kind] / MIB for run in runs]
        label = "optimizer state" if kind == "optimizer" else kind
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=10)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (place, total), (0, 4), textcoords="offset points", ha="center", weight="bold")
    axes.set(ylabel="MiB kept from step to step", ylim=(0, max(bottoms) * 1.12))
    axes.set_title(f"Memory of each rank, {WORKERS} workers", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="upper right", reverse=True)


def main() -> int:
    """Run all, show all, and say whether the plans agree with one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    arguments = parser.parse_args()
    console = Console()
    bar = (TextColumn("{task.description:<12}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="distributedtorch-demo-") as folder,
        Progress(*bar, TextColumn("{task.fields[loss]}"), console=console) as progress,
    ):
        try:
            names = (TRUTH, *PLANS)
            truth, *runs = [train(name, arguments.steps, Path(folder) / name, progress) for name in names]
        except RunFailed as failure:
            progress.stop()
            console.print(str(failure), style="red", markup=False)
            return 1
    console.print()
    console.print(table(truth, runs))
    picture(truth, runs, arguments.picture)
    return conclude(console, faults(truth, runs), arguments.picture)


def conclude(console: Console, found: list[str], path: Path) -> int:
    """The last words and the exit code."""
    console.print()
    for fault in found:
        console.print(f"NOT THE SAME  {fault}", style="bold red", markup=False)
    if not found:
        console.print(f"Every plan gives the result of one process (within {LIMIT:.0e}).", style="bold green")
    console.print(f"Picture: {path}", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
