"""Parameter servers: workers push gradients and pull parameters; the user's optimizer runs on the servers.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Zheng et al., "Asynchronous
Stochastic Gradient Descent with Delay Compensation", ICML 2017 (`compensate`); Zhang et al., "Staleness-aware Async-SGD
for Distributed Deep Learning", IJCAI 2016 (`rates=staleness`).

Each worker holds: parameters Psi, gradients Psi. Servers hold together: parameters Psi, optimizer state K Psi, and one
more Psi per version on its way. By default one server beside rank 0; `servers=n`: beside ranks 0 to n-1, which divide
whole parameters between them by size. `apart`: in the last process of the job, or the last n, which run the script up
to dt.distribute, serve there until the workers are done, and end; ranks and loaders are counted without them. They
begin with what rank 0's model and optimizer have, use the options (learning rate) of rank 0's last push, and hold the
optimizer's state in host memory; a save fetches it, K Psi, through the workers, who drop it at their next step.
Parameters that are loaded alone replace the servers'; the optimizer's state there stays, unless it is loaded too.
Travels per step and worker: Psi to the servers and Psi back. With a wire, codes both ways: of the gradient and what
earlier codes left out of it, and of what is missing in the worker's copy; servers hold such a copy, Psi, per worker.
Of tables whose gradients are sparse, the rows used go and the rows changed come back, 8 bytes more for each; not coded.
`staleness=s`: a push is computed from parameters that are at most s versions old, others wait; s=0 is the round in
which all pushes are averaged, the result of ddp. `ahead=s`: a worker more than s steps ahead of the slowest waits.
Without either, nobody waits. `clip` acts on each worker's gradient, BatchNorm on each worker's rows.
`rates=own`: a push is applied with the numbers that the pushing rank's optimizer has for options (lr, betas, ...), so
that each rank may have its own, and a scheduler counts its own rank's steps. In a round the step is taken with their
means, and each gradient counts by its learning rate over the mean one. `rates=staleness`: with the options of the
server's rank, the learning rate divided by max(1, versions applied since the pull). Otherwise with those.
Under `dtorch run --restarts` servers keep what they have applied in the run folder: when a rank is killed and all are
started again, no push that was answered is lost and none counts twice, whatever checkpoint the workers go on from.
Use it when ranks differ in speed from step to step; where all are alike, ddp is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slot
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Kept
from distributedtorch.sync.gradient import Held
from distributedtorch.sync.served import Served, not_finite
from distributedtorch.sync.state import divide_state, gather_state


class Server(Served):
    """Workers that push gradients."""

    divided = True

    def _prepare(self) -> None:
        self.held = [self._held(index) for index in range(len(self.params))]
        divide_state(self.optimizer, self.params, self.held, whole=True)

    def _held(self, index: int) -> Held:
        """Who has the optimizer's state of a parameter."""
        param, world = self.params[index], self.comm.world
        owner = self.owner(next(k for k, part in enumerate(self.parts) if index in part))
        slot = Slot(index=index, start=0, numel=param.numel(), shape=param.shape, stride=tuple(param.stride()))
        bounds = [0] * (owner + 1) + [param.numel()] * (world - owner)
        return Held(slot, param.detach().new_empty(0), bounds, self.comm, self.names[index])

    def update(self, step: Callable[[], Any]) -> Any:
        grads = [self._grad(index) for index in range(len(self.params))]
        for name, param, version in zip(self.names, self.params, self.versions, strict=True):
            if param._version != version:
                raise UsageError(_edited(name))
        self._push(grads)
        for param in () if self.refilled else self.params:  # what was shown or loaded is old now; the servers have it
            self.optimizer.state.pop(param, None)

    def _grad(self, index: int) -> Tensor | None:
        """A gradient as it is pushed: of a table its rows, of others all."""
        grad, table = self.params[index].grad, self.items[index].table
        if grad is None:
            return None
        if table and not grad.is_sparse:
            raise UsageError(_dense(self.names[index]))
        grad = grad.coalesce() if table else grad.to_dense() if grad.is_sparse else grad
        if not bool(torch.isfinite(grad.values() if table else grad).all()):
            raise UsageError(not_finite(self.comm.rank, f"the gradient of {self.names[index]!r}"))
        return grad

    # All ranks together.

    def consensus(self) -> dict[int, Tensor]:
        self.meet(state=True)
        return {}

    def keeps(self, index: int) -> Kept:
        low, high = self.held[index].bounds[self.comm.rank : self.comm.rank + 2]
        return Kept(low=low, high=high, stride=tuple(self.params[index].stride()), shape=None)

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        self.meet(state=True)
        return gather_state(self.optimizer, self.params, self.held, self.comm, whole=True)

    def take_state(self) -> None:
        divide_state(self.optimizer, self.params, self.held, whole=True)
        self.loaded()
        self.state_loaded()

    def state_loaded(self) -> None:
        self.restated = self.refilled


def _edited(name: str) -> str:
    given = f"parameter {name!r} was changed in place since it was pulled; the server's values would replace it"
    do = "edit parameters before dt.distribute, or load them with load_state_dict on all ranks"
    return explain(given, "parameters that only the servers change", do)


def _dense(name: str) -> str:
    given = f"the gradient of {name!r} is dense, though its module says sparse=True (used elsewhere too, or edited)"
    do = "sparse=False, or use the table only through its module"
    return explain(given, "a sparse gradient from every use of the table", do)
