"""Running the user's own script three times and comparing: `dt.verify` and `dtorch verify`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.core.plan import Plan
from distributedtorch.launch import folder as folders
from distributedtorch.launch import ranks as processes
from distributedtorch.launch import script as scripts
from distributedtorch.verify import record
from distributedtorch.verify.compare import Runs
from distributedtorch.verify.runs import Run, read
from distributedtorch.verify.verdict import HEAD, Verdict, judge

_LINES = 25
_PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_PLACE |= {"DISTRIBUTEDTORCH_RUN", folders.VARIABLE}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script to be run in three ways."""

    command: tuple[str, ...]
    """What stands after the interpreter: script and arguments."""
    plan: str | None
    """None: what the script's own call says."""
    workers: int
    steps: int

    @property
    def title(self) -> str:
        """What is compared, in a line."""
        plan = f"plan {self.plan}" if self.plan else "the plan of the call"
        return f"verify: {' '.join(self.command)} · {plan} · {self.workers} workers against 1 process"


def verify(
    script: str | os.PathLike[str],
    *,
    plan: str | Plan | None = None,
    workers: int = 2,
    steps: int = 10,
    args: Sequence[str] = (),
) -> Verdict:
    """Measure whether a script gives the same result under a plan as in one process.

    The script runs three times, each for some optimizer steps: in one process, in one process with the rows of every
    batch reversed (the same mathematics in another rounding order), and under the plan. Dropout is set to 0 in all.

    Args:
        script: The training script; it calls `dt.distribute`.
        plan: As in `dt.distribute`; None: as the script's own call says.
        workers: How many processes.
        steps: After how many optimizer steps a run ends.
        args: The script's own arguments.

    Raises:
        PlanError: The plan cannot be read or does not fit the workers.
        LaunchError: The script failed, or took no step.
    """
    command = (os.fspath(script), *args)
    return measure(Job(command=command, plan=None if plan is None else str(plan), workers=workers, steps=steps))


def measure(job: Job, say: Callable[[str], None] = lambda text: None) -> Verdict:
    """Carry a job out; `say` hears of every run."""
    _check(job)
    with tempfile.TemporaryDirectory(prefix="dtorch-verify-") as folder:
        truth = _said(say, "one process", lambda: alone(job, Path(folder, "truth")))
        noise = _said(say, "one process, rows reversed", lambda: alone(job, Path(folder, "noise"), reverse=True))
        plan = _said(say, f"{job.workers} workers", lambda: together(job, Path(folder, "plan")))
        return compare(job, truth, noise, plan)


def compare(job: Job, truth: Run, noise: Run, plan: Run) -> Verdict:
    """The verdict over three runs of a job."""
    precision = Plan.parse(job.plan).precision if job.plan else None
    return judge(Runs(truth=truth, noise=noise, plan=plan, precision=precision), job.title, job.steps)


def alone(job: Job, folder: Path, *, reverse: bool = False) -> Run:
    """The script in one process, with the words of the plan that change the result."""
    extra = {record.PLAN: "numerics"} | ({record.ROWS: "reversed"} if reverse else {})
    return _recorded(list(job.command), job, folder, extra, "in one process")


def together(job: Job, folder: Path) -> Run:
    """The script under the plan."""
    command = ["-m", "distributedtorch", "run", "--workers", str(job.workers), *job.command]
    return _recorded(command, job, folder, {}, f"with {job.workers} workers")


def _check(job: Job) -> None:
    if job.plan is not None:
        Plan.parse(job.plan).check(job.workers)
        record.refuse_loose(Plan.parse(job.plan))
    for name, number in (("workers", job.workers), ("steps", job.steps)):
        if number < 1:
            raise LaunchError(explain(f"{name} {number} given", "1 or more", f"give --{name} a number from 1 up"))
    if job.command[0] != "-m":
        scripts.check(job.command[0], job.workers)


def _recorded(command: list[str], job: Job, folder: Path, extra: dict[str, str], how: str) -> Run:
    """Run the script with a recorder in it. It ends with this process, whatever happens."""
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in _PLACE}
    environ |= {record.FOLDER: str(folder), record.STEPS: str(job.steps), **extra}
    if job.plan is not None:
        environ["DISTRIBUTEDTORCH_RUN_PLAN"] = job.plan
    process = processes.start(1, [sys.executable, *command], environ, folder)
    try:
        os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
        status = process.look()
    finally:
        process.clear()
    assert process.log is not None
    lines = process.log.read_text(errors="replace").splitlines()[-_LINES:]
    run = read(folder) if status == 0 else Run()
    if status != 0 or not run.steps:
        raise LaunchError(_failed(how, status, lines))
    return run


def _failed(how: str, status: int | None, lines: list[str]) -> str:
    shown = "\n".join(f"  | {line}" for line in lines)
    given = f"the script ended {how} with code {status}" if status else f"the script took no optimizer step {how}"
    do = "make it run by `python` and by `dtorch run` first" if status else "let it step an optimizer it distributed"
    return explain(f"{given}; its last lines:\n{shown}" if shown else given, "a run to compare", do)


def _said(say: Callable[[str], None], what: str, run: Callable[[], Run]) -> Run:
    began = time.monotonic()
    result = run()
    say(f"{what}: {len(result.steps)} steps in {time.monotonic() - began:.1f} s")
    return result


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the next word is a module, as in python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="how many processes (default 2)")
    parser.add_argument("--plan", metavar="P", help='the strategy, say "zero2"; goes before what the call says')
    parser.add_argument("--steps", type=int, metavar="K", help="optimizer steps to compare (default 10)")


def act(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and give 0 for the same result, 1 for another."""
    rest = arguments.arguments
    if arguments.workers is None and arguments.plan is None and arguments.steps is None:
        after = argparse.ArgumentParser(prog="dtorch verify", add_help=False, allow_abbrev=False)
        _add_options(after)
        arguments, rest = after.parse_known_args(rest, argparse.Namespace(**vars(arguments)))
    command = (*(["-m"] if arguments.module else []), arguments.script, *rest)
    workers = 2 if arguments.workers is None else arguments.workers
    steps = 10 if arguments.steps is None else arguments.steps
    job = Job(command=command, plan=arguments.plan, workers=workers, steps=steps)
    verdict = measure(job, say=lambda text: print(f"verify: {text}", file=sys.stderr, flush=True))
    show(verdict)
    return 0 if verdict else 1


def show(verdict: Verdict) -> None:
    """Print a verdict: as a table by rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(verdict)
        return
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    table = Table()
    for number, head in enumerate(HEAD):
        table.add_column(head, justify="left" if number == 0 else "right", overflow="fold")
    for cells in verdict.table():
        table.add_row(*cells)
    console.print(verdict.title, soft_wrap=True)
    console.print(table)
    for line in verdict.lines():
        console.print(line, soft_wrap=True)
