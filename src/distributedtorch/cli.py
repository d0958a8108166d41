"""`dtorch`: the commands. A mistake of the user's is a message on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distributedtorch import recipes
from distributedtorch.core.errors import DistributedTorchError
from distributedtorch.launch.supervise import supervise
from distributedtorch.verify import measure


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    help: str
    """One line for `dtorch --help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Declares its arguments."""
    act: Callable[[argparse.Namespace], int]
    """Does it, and gives the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="dtorch", description="Train a plain PyTorch loop over several processes.")
    names = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.add_arguments(names.add_parser(name, help=command.help, description=command.help))
    arguments = parser.parse_args(argv)
    try:
        return COMMANDS[arguments.command].act(arguments)
    except DistributedTorchError as error:
        print(f"dtorch: {error}", file=sys.stderr)
        return 2


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--plan", metavar="P", help='the strategy, say "zero2,bf16"; goes before what the call says')
    parser.add_argument("--port", type=int, metavar="PORT", help="where they meet on loopback (default: a free one)")
    parser.add_argument("-m", dest="module", action="store_true", help="the next word is a module, as in python -m")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def _run(arguments: argparse.Namespace) -> int:
    check_plan(arguments.plan, arguments.workers)
    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    script = None if arguments.module else arguments.script
    return supervise(command, arguments.workers, plan=arguments.plan, script=script, port=arguments.port)


def check_plan(plan: str | None, workers: int) -> None:
    """Refuse a plan that cannot be read, or that does not fit so many processes, before anything starts."""
    if plan is None:
        return
    from distributedtorch.core.plan import Plan

    Plan.parse(plan).check(workers)


COMMANDS: dict[str, Command] = {
    "run": Command(help="run a script in several processes", add_arguments=_run_arguments, act=_run),
    "plan": Command(help="say what a plan means", add_arguments=recipes.add_arguments, act=recipes.run),
    "verify": Command(
        help="measure that a plan gives the result of one process", add_arguments=measure.add_arguments, act=measure.act
    ),
}
"""Every subcommand; a new one is one row here."""
