"""`dtorch`: the commands. A mistake of the user's is a message on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from distributedtorch import menu
from distributedtorch.core.errors import DistributedTorchError, tell


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    help: str
    """One line for `dtorch --help`."""
    module: str
    """Where its `add_arguments(parser)` and `act(arguments)` are; imported only when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="dtorch", description="Train a plain PyTorch loop over several processes.")
    names = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        sub = names.add_parser(name, help=command.help, description=command.help)
        if words[:1] == [name]:
            import_module(command.module).add_arguments(sub)
    arguments = parser.parse_args(words)
    try:
        code: int = import_module(COMMANDS[arguments.command].module).act(arguments)
        return code
    except DistributedTorchError as error:
        tell(f"dtorch: {error}")
        return 2


COMMANDS: dict[str, Command] = {
    "run": Command(help="run a script in several processes", module="distributedtorch.launch.command"),
    "plan": Command(help="say what a plan means", module=menu.__name__),
    "verify": Command(
        help="measure that a plan gives the result of one process", module="distributedtorch.verify.measure"
    ),
    "checkpoint": Command(
        help="list, show, verify and remove checkpoints", module="distributedtorch.checkpoint.command"
    ),
    "convert": Command(
        help="turn checkpoints into plain weights, and those of others into checkpoints",
        module="distributedtorch.checkpoint.convert",
    ),
}
"""Every subcommand; a new one is one row here."""
