"""`dtorch run`: a script in several processes."""

from __future__ import annotations

import argparse
import os
import sys

from distributedtorch.core.errors import tell
from distributedtorch.core.plan import Plan
from distributedtorch.launch import ranks
from distributedtorch.launch.script import downloads
from distributedtorch.launch.supervise import supervise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--plan", metavar="P", help='the strategy, say "zero2,bf16"; goes before what the call says')
    parser.add_argument("--port", type=int, metavar="PORT", help="MASTER_PORT on loopback (default: a free one)")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start all again after a failure, at most so often"
    )
    parser.add_argument(
        "--hang",
        metavar="TIME",
        help="how long a rank waits for one that does not come before the job ends, say 5min, or off "
        f"(default: {ranks.HANG_WITH_RESTARTS} with --restarts, else 30min)",
    )
    parser.add_argument(
        "--reserve", metavar="WHAT", help="leave to other jobs: devices=1,memory=8GiB (of each device in use), or one"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the next word is a module, as in python -m")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def act(arguments: argparse.Namespace) -> int:
    """Start the processes, see them through, and give the exit code."""
    if arguments.plan is not None:
        Plan.parse(arguments.plan).check(arguments.workers)
    if wanted := arguments.reserve or os.environ.get("DISTRIBUTEDTORCH_RESERVE"):
        from distributedtorch.launch import reserve  # with torch, for which the command does not wait otherwise

        reserve.parse(wanted)
        os.environ[reserve.RESERVE] = wanted
    if arguments.hang is not None:
        os.environ[ranks.HANG_VARIABLE] = arguments.hang
    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    script = None if arguments.module else arguments.script
    if script is not None and arguments.workers > 1 and (line := downloads(script)):
        said = "rank 0 runs alone up to its first call that needs the others, which then find the files"
        tell(f"dtorch: {line} downloads: {said} (dt.main_first() narrows that to a block)")
        os.environ[ranks.AFTER_MAIN] = line
    return supervise(
        command,
        arguments.workers,
        plan=arguments.plan,
        script=script,
        port=arguments.port,
        restarts=arguments.restarts,
    )
