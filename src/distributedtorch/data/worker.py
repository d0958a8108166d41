"""What a data worker process does before it loads: end with its rank, show the user's dataset, differ between ranks.

torch's workers notice a lost parent only between tasks and only every few seconds; on Linux the kernel is asked to end
them at once, also after `kill -9`. The kernel watches the *thread* that started the worker, so this is asked for only
when that is the main thread.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """A `worker_init_fn` that adds to the user's own; picklable if that is."""

    user: Callable[[int], None] | None
    """The user's `worker_init_fn`, called last."""
    mortal: bool
    """Whether the worker must die with the process that started it."""

    def __call__(self, worker: int) -> None:
        if self.mortal:
            die_with_parent()
        show_user_dataset()
        if self.user is not None:
            self.user(worker)


def start(user: Callable[[int], None] | None) -> Start:
    """The `worker_init_fn` for workers that this thread is about to start."""
    mortal = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    return Start(user, mortal)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A refusal leaves torch's own slower watch."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def show_user_dataset() -> None:
    """Make `get_worker_info().dataset` the user's dataset where ours stands around it."""
    info: Any = get_worker_info()
    if info is not None and hasattr(info.dataset, "user_dataset"):
        # WorkerInfo is frozen, but worker_init_fn is meant to read and change the dataset it names.
        object.__setattr__(info, "dataset", info.dataset.user_dataset)


def reseed(rank: int) -> None:
    """Give this worker's global random states another seed on every rank but 0."""
    info: Any = get_worker_info()
    if rank == 0 or info is None:
        return
    seed = info.seed + rank * info.num_workers
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
