"""Two added lines turn a plain PyTorch loop into training over any number of processes, with the same result.

The map of the package:
  distribute   the call: plan -> parts -> attached to the user's objects
  facade       DistributedPyTorch, and in strategy Strategy: other faces of the same call
  menu         which words of a plan are built, what each costs
  recipes      plan word -> parts
  schedule     learning rates over optimizer steps
  decide       early stopping and other decisions that all ranks take together
  locks        one rank at a time, or many that only read
  core         words and contracts: plan, comm, bucket, step, errors
  sync         how replicas agree: ddp, zero, local, diloco, gossip; BatchNorm over ranks
  wire         how bytes travel: shorter types, integers, signs, the largest few, low rank
  data         which rank sees which sample
  launch       starting, joining and ending processes
  elastic      the watch that names a missing rank
  checkpoint   saving and loading the state of a run
  score        what an evaluation reports, and whether two runs differ
  verify       the measured difference to one process
"""

import sys as _sys
from os.path import dirname as _dirname
from os.path import join as _join

_command = _sys.orig_argv[1:3] == ["-m", "distributedtorch"] or _sys.argv[:1] == [
    _join(_dirname(_sys.executable), "dtorch")
]
if not _command:  # `dtorch` needs none of this, nor the two seconds that torch takes
    from distributedtorch import menu as _menu  # tells core.plan what is built
    from distributedtorch.core.errors import (
        CheckpointError,
        DesyncError,
        DistributedTorchError,
        LaunchError,
        LockError,
        PeerError,
        PlanError,
        RankError,
        UsageError,
    )
    from distributedtorch.core.plan import Plan
    from distributedtorch.data.assign import assign
    from distributedtorch.data.folds import folds
    from distributedtorch.decide import EarlyStop, all, any
    from distributedtorch.distribute import distribute, launch
    from distributedtorch.evaluation import accuracy, evaluate, scores
    from distributedtorch.facade import DistributedPyTorch
    from distributedtorch.launch.start import prepare as _prepare
    from distributedtorch.locks import lock
    from distributedtorch.saving import load, resume, save
    from distributedtorch.schedule import schedule
    from distributedtorch.score.compare import compare
    from distributedtorch.strategy import Strategy
    from distributedtorch.values import (
        barrier,
        device,
        is_main,
        main_first,
        mean,
        print,
        rank,
        stats,
        sync,
        total,
        weight,
        world,
    )
    from distributedtorch.verify.measure import verify

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "DesyncError",
    "DistributedPyTorch",
    "DistributedTorchError",
    "EarlyStop",
    "LaunchError",
    "LockError",
    "PeerError",
    "Plan",
    "PlanError",
    "RankError",
    "Strategy",
    "UsageError",
    "accuracy",
    "all",
    "any",
    "assign",
    "barrier",
    "compare",
    "device",
    "distribute",
    "evaluate",
    "folds",
    "is_main",
    "launch",
    "load",
    "lock",
    "main_first",
    "mean",
    "print",
    "rank",
    "resume",
    "save",
    "schedule",
    "scores",
    "stats",
    "sync",
    "total",
    "verify",
    "weight",
    "world",
]

if not _command:
    _prepare()
    del _menu
