"""Runs a module as if its ranks were on several hosts: `-m tests.hosts 0,0,1 MODULE WORDS`, the host of each rank."""

from __future__ import annotations

import runpy
import sys

import distributedtorch as dt
from distributedtorch.core import segment
from distributedtorch.core.world import here


def pretend(hosts: str) -> None:
    """Let ranks that join after this be on these hosts."""
    segment.host = lambda: f"host {hosts.split(',')[dt.rank()]}"


def main() -> None:
    hosts, module, *words = sys.argv[1:]
    pretend(hosts)
    dt.barrier()
    across = here().comm.hosts
    assert across is not None and len(across.groups) == len(set(hosts.split(",")))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
