"""Broken builds that the equality tests must catch: each breaks one line of the library, then runs a pool.

`python -m tests.conformance.sabotage NAME POOL ARGUMENTS...`; after `NAME,watched` the library itself looks whether
replicas part, else the pool alone has to see it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import torch

from distributedtorch import decide, guard
from distributedtorch.core import batches, once
from distributedtorch.core.comm import Comm
from distributedtorch.sync import batchnorm, optimizers
from distributedtorch.sync.gradient import Held
from distributedtorch.sync.sparse import Sparse


def ranks_count_equally() -> None:
    settle = batches.Batches.settle

    def wrong(self: batches.Batches, *, explicit: bool) -> batches.Rows | None:
        rows = settle(self, explicit=explicit)
        return rows and batches.Rows(mine=1.0, everywhere=float(torch.distributed.get_world_size()), batch=rows.batch)

    batches.Batches.settle = wrong  # type: ignore[method-assign]


def local_norms() -> None:
    Held.norm = lambda self, order: self.local.abs().sum()  # type: ignore[method-assign]


def gradients_stay_local() -> None:
    begin = Comm._begin

    def wrong(self: Comm, kind: str, name: str, flat: torch.Tensor, *rest: object, **kw: bool) -> object:
        if kind in ("reduce-scatter", "all-reduce"):
            flat = flat.clone()
        return begin(self, kind, name, flat, *rest, **kw)  # type: ignore[arg-type]

    Comm._begin = wrong  # type: ignore[method-assign,assignment]


def rows_stay_local() -> None:
    Sparse._everywhere = lambda self, index, counts: self.local[index]  # type: ignore[method-assign,assignment,return-value]


def batchnorm_stays_local() -> None:
    batchnorm.synchronise = lambda model, loop: None


def adafactor_on_pieces() -> None:
    optimizers.ELEMENTWISE = (*optimizers.ELEMENTWISE, torch.optim.Adafactor)


def decisions_stay_local() -> None:
    decide._of_all = lambda name, value: [value]


def edits_stay_unseen() -> None:
    once.Once.edited = lambda self: int(self._pages[-1])  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        ranks_count_equally,
        local_norms,
        gradients_stay_local,
        rows_stay_local,
        batchnorm_stays_local,
        adafactor_on_pieces,
        decisions_stay_local,
        edits_stay_unseen,
    )
}

if __name__ == "__main__":
    named, _, watched = sys.argv[1].partition(",")
    if not watched:
        guard._one_replica = lambda world: None
    SABOTAGES[named]()
    pool = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(pool, run_name="__main__", alter_sys=True)
