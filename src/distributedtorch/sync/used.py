"""Rows of tables that only some replicas used: averaged over those, not over all (FedSubAvg); `rows=used`.

Ding et al., "Federated Submodel Optimization for Hot and Cold Data Features", NeurIPS 2022.

Each rank holds: beside what `local` or `diloco` hold, what all last agreed on, and a byte per row of each table.
Travels per round and rank: those bytes more, to N-1 ranks.

Of a table (`nn.Embedding`, `nn.EmbeddingBag`) a replica moves the rows that its own batches use. One that a single
replica of N has used since the last round moves by an Nth in the mean. Under ddp Adam moves it as far as that replica
did, because its steps do not depend on how large gradients are; so rare words learn N times slower in replicas. Here
what replicas have moved is divided by the number of those that used the row. Rows that nobody used take the mean.
Use it with optimizers that divide gradients by their size (Adam, Adagrad, RMSprop). Do not with plain SGD, whose mean
is right as it is; where a period is so long that every replica uses all rows, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.sync.rows import rows_used

USED = "used/"
"""With what names begin, in a checkpoint, of rows used since the last round."""


class UsedRows:
    """Which rows of tables this replica has used since the last round."""

    def __init__(self, comm: Comm, name: str, params: Sequence[nn.Parameter], models: Iterable[nn.Module]) -> None:
        self.comm, self.name, self.params = comm, f"{name}/used", params
        modules = [module for model in models for module in model.modules()]
        tables = {id(one.weight) for one in modules if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
        self.flags = {
            index: torch.zeros(len(param), dtype=torch.uint8, device=param.device)
            for index, param in enumerate(params)
            if id(param) in tables
        }

    def note(self) -> None:
        """A step was taken, with the gradients that parameters have now."""
        for index, flags in self.flags.items():
            if (grad := self.params[index].grad) is not None:
                flags |= rows_used(grad.detach())

    def weights(self) -> dict[int, Tensor]:
        """By table, what the mean movement of each row is multiplied by. A group call."""
        if not self.flags:
            return {}
        every = self.comm.exchange(self.name, torch.cat([flags.cpu() for flags in self.flags.values()]))
        counts = every.sum(dim=0).split([len(flags) for flags in self.flags.values()])
        return {index: self._weight(index, count) for index, count in zip(self.flags, counts, strict=True)}

    def _weight(self, index: int, count: Tensor) -> Tensor:
        param, world = self.params[index], self.comm.world
        by = count.masked_fill(count == 0, world).to(param.device, torch.promote_types(param.dtype, torch.float32))
        return (world / by).view(-1, *[1] * (param.dim() - 1))

    def forget(self) -> None:
        """None is used any more: a round begins, or replicas are the same."""
        for flags in self.flags.values():
            flags.zero_()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        return {f"{USED}{index}": flags for index, flags in self.flags.items()}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; where that is of a run that did not count, nothing was used."""
        for index, flags in self.flags.items():
            flags.copy_(state.get(f"{USED}{index}", torch.zeros_like(flags)))
