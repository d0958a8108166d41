"""Parameter servers that average: workers step with optimizers of their own and push what that has changed.

Zhang, Choromanska & LeCun, "Deep Learning with Elastic Averaging SGD", NeurIPS 2015, and Dean et al., "Large Scale
Distributed Deep Networks", NeurIPS 2012, keep replicas that way too; here a push is the change since the last pull, and
its answer replaces the replica.

Each worker holds: parameters Psi, what it pulled last Psi, gradients Psi, optimizer state K Psi of its own. Servers
hold together: parameters Psi, one more Psi per version on its way, with a wire one per worker.
Travels per push and worker: Psi to the servers and Psi back, so that much divided by `every` per step; of tables whose
gradients are sparse, the rows that have changed.
`server(push=updates)`: the server adds a change divided by the number of workers; in rounds (`staleness=0`) the mean of
all changes. `every=k`: a push after every k-th step. Where ranks wait for each other (a barrier, a save) they push what
they have stepped so far: at once under a bound, together in rounds.
Use it where the link is slow, or where the optimizer's state is to be each rank's own. Not for exactness: for plain SGD
`server(staleness=0,push=updates)` is ddp, for others it depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.bucket import once
from distributedtorch.core.errors import UsageError
from distributedtorch.core.sync import bytes_of, leaves
from distributedtorch.serve.parcel import sparse
from distributedtorch.serve.rows import different
from distributedtorch.sync.loose import agreed
from distributedtorch.sync.served import Served, not_finite


class Updates(Served):
    """Workers that push what their own optimizers have changed."""

    def _prepare(self) -> None:
        self.base = [param.detach().clone() for param in self.params]
        """What was pulled last."""
        self.taken = 0
        """Steps since then."""

    def update(self, step: Callable[[], Any]) -> Any:
        if not self.pulled:
            self._pull()
        result = step()
        self.taken += 1
        self.used, self.differ = False, True
        if self.taken >= self.terms.every:
            self._bring()
        return result

    @torch.no_grad()
    def _bring(self) -> None:
        """Push what has changed since the last pull."""
        if not self.pulled:
            self._pull()
        changes = [self._change(index) for index in range(len(self.params))]
        self.taken = 0
        for name, change in zip(self.names, changes, strict=True):
            if not bool(torch.isfinite(change.values() if change.is_sparse else change).all()):
                self.landed()  # back to what was pulled
                raise UsageError(not_finite(self.comm.rank, f"what the optimizer made of {name!r}"))
        self._push(changes)

    def _change(self, index: int) -> Tensor:
        param, base = self.params[index].detach(), self.base[index]
        if not self.items[index].table:
            return param - base
        rows = different(base, param)
        return sparse(rows, param[rows] - base[rows], param.shape)

    def places(self) -> list[Tensor]:
        return self.base

    def landed(self) -> None:
        for param, base in zip(self.params, self.base, strict=True):
            param.detach().copy_(base)

    def _rest(self) -> None:
        """A replica that has stepped keeps what it pulled, unless others may wait for its push."""
        if self.taken and self.terms.bounded and not self.used:
            self._bring()
        if self.used or not self.taken:
            super()._rest()

    def meet(self, *, state: bool) -> None:
        self.used = False
        self._take_over()
        taken = bool(self.taken)
        if self.terms.rounds:
            taken = bool(self.comm.exchange(f"{self.name}/taken", torch.tensor(self.taken)).any())
        if taken:
            self._bring()
        super().meet(state=state)

    def loaded(self) -> None:
        super().loaded()
        self.taken = 0

    # What a checkpoint holds of replicas: optimizers; parameters are the servers', running statistics the mean.

    def _replica(self) -> Iterator[tuple[str, Tensor]]:
        for index, param in enumerate(self.params):
            for path, tensor in leaves(self.optimizer.state.get(param, {})):
                yield f"state/{index}/{'/'.join(map(str, path))}", tensor

    def own_state(self) -> dict[str, Tensor]:
        return {**super().own_state(), **{name: value.detach() for name, value in self._replica()}}

    @torch.no_grad()
    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().take_own_state(state)
        for name, value in self._replica():
            once(value.detach()).copy_(once(state[name], value))

    def consensus(self) -> dict[int, Tensor]:
        self.settle()
        return agreed(self.comm, self.name, list(self._replica()))

    def bytes_held(self) -> dict[str, int]:
        held = super().bytes_held()
        return {**held, "parameters": held["parameters"] + sum(map(bytes_of, self.base))}
