"""What `mpirun` and `srun` leave in the environment of the processes they start, in torchrun's words.

Open MPI says everything in `OMPI_COMM_WORLD_*`. MPICH's starters say `PMI_*` and `MPI_LOCAL*`. Slurm describes the step
in `SLURM_STEP_*`; a shell of `sbatch` or `salloc` has the other `SLURM_*` variables and is not a task. Open MPI and
MPICH may start their own helpers by srun, so they are asked before Slurm.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distributedtorch.core.errors import LaunchError, explain

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm's numbers for steps that srun did not start: batch, interactive, extern."""
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Above what services use, below what the kernel gives to clients."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a starter says of one process, as texts still to be checked."""

    launcher: Literal["mpirun", "srun"]
    names: tuple[str, str, str, str]
    """The variables that hold rank, world, local rank and local world."""
    values: Mapping[str, str]
    """Their texts, by those names; one that is not set is missing."""
    job: str
    """The same text in every process of the job, and in no other job on this host."""


def read(env: Mapping[str, str]) -> Started | None:
    """What mpirun or srun says, or None where neither started this process."""
    if "OMPI_COMM_WORLD_RANK" in env:
        return _open_mpi(env)
    step = _is_task(env)
    if "PMI_RANK" in env and not (step and _agrees(env)):
        return _mpich(env)
    if step:
        return _slurm(env)
    if "PMIX_RANK" in env:
        given = f"PMIX_RANK={env['PMIX_RANK']}, and nothing that says how many processes there are"
        do = "start by mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process"
        raise LaunchError(explain(given, "OMPI_COMM_WORLD_SIZE, PMI_SIZE or SLURM_STEP_NUM_TASKS beside it", do))
    return None


def _open_mpi(env: Mapping[str, str]) -> Started:
    rank, world, local_rank, local_world = (
        f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _parent()
    return Started(
        launcher="mpirun", names=(rank, world, local_rank, local_world), values=env, job=as_file_name(f"mpirun-{job}")
    )


def _mpich(env: Mapping[str, str]) -> Started:
    return Started(
        launcher="mpirun",
        names=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        values=env,
        job=as_file_name(f"mpirun-{env.get('PMI_JOBID') or _parent()}"),
    )


def _slurm(env: Mapping[str, str]) -> Started:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    here = _tasks_here(env.get(names[3], ""), env.get("SLURM_NODEID", "0"))
    values = {**{name: env[name] for name in names if name in env}, **({names[3]: here} if here else {})}
    return Started(launcher="srun", names=names, values=values, job=as_file_name(f"srun-{_step(env)}"))


def _is_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one task of a step."""
    step = env.get("SLURM_STEP_ID", "")
    ours = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return ours and "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def _agrees(env: Mapping[str, str]) -> bool:
    """Whether PMI_RANK speaks of srun's own tasks (`srun --mpi=pmi2`), not of processes under MPICH's helpers."""
    mine, theirs = ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    return [env.get(name) for name in mine] == [env.get(name) for name in theirs]


def _step(env: Mapping[str, str]) -> str:
    return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"


def _tasks_here(counts: str, node: str) -> str:
    """This node's number out of `2(x3),1`: two on each of the first three nodes, one on the fourth."""
    each: list[str] = []
    for item in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if found is None:
            return ""
        each += [found[1]] * int(found[2] or 1)
    return each[int(node)] if node.isdecimal() and int(node) < len(each) else ""


def slurm_address(env: Mapping[str, str]) -> str | None:
    """The first host of the step: rank 0 runs there."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return first_host(hosts) if hosts else None


def slurm_port(env: Mapping[str, str]) -> int:
    """A port that every task of the step comes to by itself; another step comes to another one most likely."""
    return _FIRST_PORT + zlib.crc32(_step(env).encode()) % _NUM_PORTS


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: `gpu[003-005,9],login` begins with gpu003.

    Raises:
        LaunchError: The list cannot be read.
    """
    first = re.match(r"((?:[^,\[\]]|\[\d[\d,-]*\])+)(?:,|$)", hosts)
    name = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", first[1]) if first else ""
    if not name:
        do = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        raise LaunchError(explain(f"the host list {hosts!r}", "a list as Slurm writes it", do))
    return name


def _parent() -> str:
    """The process that started this one and its siblings, for starters that give their job no name."""
    return f"{os.getppid()}-{start_time(os.getppid())}"


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number this means one process only. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def as_file_name(text: str) -> str:
    """The text with nothing in it that a file's name cannot have."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", text)
