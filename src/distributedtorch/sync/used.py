"""Rows of tables count for replicas by how often these use them, not all alike; `rows=used`.

After Ding et al., "Federated Submodel Optimization for Hot and Cold Data Features", NeurIPS 2022.

Each rank holds: beside what `local` or `diloco` hold, what all last agreed on, and four bytes per row of each table.
Travels per round and rank: those bytes too, to N-1 ranks.

Of a table (`nn.Embedding`, `nn.EmbeddingBag`) a step moves the rows that its batch uses. Adam divides a gradient by the
root of its mean square, so that a row moves by the root of how often it is used; one that a single replica of N uses
moves as far under ddp as in that replica alone, but by an Nth in the mean over replicas. Rare words then learn later
than under ddp. Here the movement of a row in replica i is not divided by N but multiplied by the root of v_i / v:

    v_i = e + (1 - e) f_i,    v = P (e / F + 1 - e),    P = S + S^2 - Q,    F = 1 - product of (1 - f_j)

where f_j is the part of its steps in which replica j has used the row, S and Q are the sums of f_j and of their
squares, and e is the part of a mean square that the last gradient is (1 - beta2). These are the mean squares of the
row's gradient when it is used, in the replica and under ddp, if its gradients are all alike and replicas use it
independently. It is 1/N for a row that all use in every step, and 1 for the only one that ever uses it. Who has never
used it counts for nothing; where nobody has, all count alike.
Use it with Adam and its like. With plain SGD the mean is right as it is, and the words are refused. Which rows a step
uses is read from gradients, which takes a pass over them. A table that an `nn.Linear` has too (an output layer) is left
as it is, and that is said: every step uses all of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.sync import Trained, require_like
from distributedtorch.sync.rows import rows_used

USED = "used/"
"""With what names begin, in a checkpoint, of how often rows were used."""


class UsedRows:
    """How often this replica has used the rows of tables, and what its movement of them counts for."""

    def __init__(self, trained: Trained, comm: Comm) -> None:
        if isinstance(trained.optimizer, torch.optim.SGD):
            needed = "an optimizer that divides gradients by their size (Adam, RMSprop, Adagrad)"
            raise UsageError(explain("rows=used with SGD", needed, "leave rows=used out: for SGD the mean is right"))
        self.comm, self.name, self.params = comm, f"round/{trained.name}/used", trained.params
        self.optimizer = trained.optimizer
        modules = [module for model in trained.models for module in model.modules()]
        tables = {id(one._parameters["weight"]) for one in modules if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
        outputs = {id(one._parameters.get("weight")) for one in modules if isinstance(one, nn.Linear)}
        named = zip(trained.names, self.params, strict=True)
        self.tied = [name for name, param in named if id(param) in tables & outputs]
        """Tables that are output layers too."""
        places = [(k, param) for k, param in enumerate(self.params) if id(param) in tables - outputs]
        self.counts = {k: torch.zeros(len(param), dtype=torch.int32, device=param.device) for k, param in places}
        """By table, the steps that have used each row."""
        self.steps = torch.zeros((), dtype=torch.int64)
        self.alike = torch.zeros((), dtype=torch.bool)
        """Whether all replicas have the same movement now, whoever has used what."""

    def note(self) -> None:
        """A step is about to be taken, with the gradients that parameters have now."""
        self.steps += 1
        for index, count in self.counts.items():
            if (grad := self.params[index].grad) is not None:
                count += rows_used(grad.detach())

    def parts(self) -> dict[int, Tensor]:
        """By table, what this replica's movement of each row is multiplied by, before the mean. A group call."""
        if self.alike:
            return {}
        every = self.comm.exchange(self.name, torch.cat(list(self.counts.values())))
        often = (every.double() / self.steps.clamp(min=1)).split([len(count) for count in self.counts.values()], dim=1)
        return {index: self._part(index, of_table) for index, of_table in zip(self.counts, often, strict=True)}

    def _part(self, index: int, often: Tensor) -> Tensor:
        param, last, own, total = self.params[index], self._last(index), often[self.comm.rank], often.sum(dim=0)
        by_any = 1 - (1 - often).prod(dim=0)
        together = (total + total.square() - often.square().sum(dim=0)) * (last / by_any + 1 - last)
        part = self.comm.world * ((last + (1 - last) * own) / together).sqrt()
        part = part.where(own > 0, 0.0).where(by_any > 0, 1.0)
        return part.to(torch.promote_types(param.dtype, torch.float32)).view(-1, *[1] * (param.dim() - 1))

    def _last(self, index: int) -> float:
        """The part of a mean square of gradients that the last one is."""
        groups = [g for g in self.optimizer.param_groups if any(p is self.params[index] for p in g["params"])]
        options = groups[0] if groups else {}
        return 1 - float(options["betas"][1] if "betas" in options else options.get("alpha", 1.0))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        counts = {f"{USED}{index}": count for index, count in self.counts.items()}
        return {**counts, f"{USED}steps": self.steps, f"{USED}alike": self.alike}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; where that is of a run that did not count, nothing was used."""
        for name, mine in self.state().items():
            mine.copy_(require_like(name, state[name], mine) if name in state else torch.zeros_like(mine))
