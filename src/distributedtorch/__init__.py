"""Two added lines turn a plain PyTorch loop into training over any number of processes, with the same result.

The map of the package:
  distribute   the call: plan -> parts -> attached to the user's objects
  recipes      the menu: plan word -> part
  core         words and contracts: plan, comm, bucket, step, errors
  sync         how replicas agree: ddp, zero; BatchNorm over ranks
  data         which rank sees which sample
  launch       starting, joining and ending processes
  elastic      the watch that names a missing rank
  checkpoint   saving and loading the state of a run
  verify       the measured difference to one process
"""

from distributedtorch import recipes as _recipes  # the menu tells core.plan what is built
from distributedtorch.core.errors import (
    CheckpointError,
    DesyncError,
    DistributedTorchError,
    LaunchError,
    PeerError,
    PlanError,
    RankError,
    UsageError,
)
from distributedtorch.core.plan import Plan
from distributedtorch.distribute import distribute, launch
from distributedtorch.launch.start import prepare as _prepare
from distributedtorch.saving import load, save
from distributedtorch.values import barrier, device, is_main, main_first, mean, print, rank, stats, total, weight, world
from distributedtorch.verify.measure import verify

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "DesyncError",
    "DistributedTorchError",
    "LaunchError",
    "PeerError",
    "Plan",
    "PlanError",
    "RankError",
    "UsageError",
    "barrier",
    "device",
    "distribute",
    "is_main",
    "launch",
    "load",
    "main_first",
    "mean",
    "print",
    "rank",
    "save",
    "stats",
    "total",
    "verify",
    "weight",
    "world",
]

_prepare()
del _recipes
