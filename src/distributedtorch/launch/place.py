"""Which process this is: its rank, the world it belongs to, and who started it, read from the environment alone.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` are what torchrun sets and what
`dtorch run` sets too; `DISTRIBUTEDTORCH_RUN` (the run folder) is ours alone. They go before what mpirun and srun set
(`variables`), because torchrun and dtorch may run inside a task of those. Without any of them, or where mpirun or srun
started one process only: one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.launch import variables

Launcher = Literal["dtorch", "torchrun", "mpirun", "srun", "none"]

_DO = "start with `dtorch run --workers N script.py` or torchrun, or unset RANK and WORLD_SIZE to run one process"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands."""

    rank: int
    """This process's number, 0 to world - 1."""
    world: int
    """How many processes take part."""
    local_rank: int
    """This process's number on its host."""
    local_world: int
    """How many processes take part on this host."""
    launcher: Launcher
    """Who started it."""
    run_folder: Path | None
    """Where logs and end records go; only under `dtorch`."""
    job: str = ""
    """The same text in every process of the job, fit for a file name; only under mpirun and srun."""


def find(environ: Mapping[str, str] | None = None) -> Place:
    """Read this process's place; `LaunchError` where the variables contradict each other."""
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        started = variables.read(env)
        return _ALONE if started is None else _started(started)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise LaunchError(explain(f"{_given(env)}, but {name} is not set", f"{name} beside the others", _DO))
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_rank, local_world = _number(env, "LOCAL_RANK", rank), _number(env, "LOCAL_WORLD_SIZE", world)
    _number(env, "MASTER_PORT")
    _check_below("RANK", rank, world, _given(env))
    _check_below("LOCAL_RANK", local_rank, local_world, _given(env))
    folder = env.get("DISTRIBUTEDTORCH_RUN")
    return Place(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        launcher="dtorch" if folder else "torchrun",
        run_folder=Path(folder) if folder else None,
    )


_ALONE = Place(rank=0, world=1, local_rank=0, local_world=1, launcher="none", run_folder=None)


def _started(started: variables.Started) -> Place:
    """The place that mpirun or srun says, where it started more than one process."""
    rank, world, local_rank, local_world = (_number(started.values, name) for name in started.names)
    given = " ".join(f"{name}={started.values[name]}" for name in started.names)
    _check_below(started.names[0], rank, world, given)
    _check_below(started.names[2], local_rank, local_world, given)
    _check_below(started.names[3], local_world, world + 1, given)
    if world == 1:
        return _ALONE
    return Place(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        launcher=started.launcher,
        run_folder=None,
        job=started.job,
    )


def _check_below(name: str, value: int, limit: int, given: str) -> None:
    if value >= limit:
        raise LaunchError(explain(f"{given}: {name} is {value}", f"a number below {limit}", _DO))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if not text and default is not None:
        return default
    if not text or not text.isdecimal():
        raise LaunchError(explain(f"{name}={text!r}", "a whole number, 0 or more", _DO))
    return int(text)


def _given(env: Mapping[str, str]) -> str:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(f"{name}={env[name]}" for name in names if name in env)
