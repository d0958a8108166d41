"""Sparse gradients: tables of which a batch uses few rows (`nn.Embedding(..., sparse=True)`).

Each rank holds: the table; of its gradient the rows that the global batch used; optimizer state K Psi, or K Psi/N
where the plan divides state and the optimizer keeps it by rows (SparseAdam, Adagrad).
Travels per backward and rank: its own used rows, numbers and values, to N-1 ranks; where state is divided, per step
also the updated rows, each from its owner.

`p.grad` is a plain sparse tensor, the same on all ranks: the gradient of the global batch. Use it for tables that are
large beside what a batch uses of them. Do not where most rows are used: a dense gradient travels in half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributedtorch.core.bucket import Slot
from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import DesyncError, UsageError, explain
from distributedtorch.core.sync import Kept
from distributedtorch.sync.alone import Alone
from distributedtorch.sync.gradient import Held
from distributedtorch.sync.state import divide_state, gather_state, step_on

_BY_ROWS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.SparseAdam, torch.optim.Adagrad)
"""Change only the rows that the gradient has, and keep their state in dense tensors of the table's shape."""


def tables(models: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters whose gradients will be sparse."""
    modules = [module for model in models for module in model.modules()]
    return {id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}


class Sparse(Alone):
    """Tables whose gradients travel as the rows that were used."""

    @property
    def apart(self) -> bool:
        return True

    def __init__(
        self,
        params: list[nn.Parameter],
        names: list[str],
        optimizer: torch.optim.Optimizer | None,
        comm: Comm,
        name: str,
        *,
        divide: bool,
    ) -> None:
        super().__init__(params, names, optimizer, comm)
        self.name = name
        self.divided = divide and type(optimizer) in _BY_ROWS and comm.world > 1
        self.rows = [[len(param) * k // comm.world for k in range(comm.world + 1)] for param in params]
        """For each table the rows that each rank updates where state is divided."""
        self.local: list[Tensor | None] = [None] * len(params)
        """This backward's gradients on this rank."""
        self.counts: Callable[[], Tensor] | None = None
        self.take_state()

    def ready(self, index: int, *, again: bool) -> None:
        grad = self.params[index].grad
        if grad is not None and not grad.is_sparse:
            raise UsageError(_dense(self.names[index]))

    def launch_rest(self) -> None:
        self.local = [None if param.grad is None else param.grad.coalesce() for param in self.params]
        counts = [0 if grad is None else grad._nnz() for grad in self.local]
        self.counts = self.comm.exchange_begin(f"rows/{self.name}", torch.tensor(counts))

    def finish(self, used: Sequence[bool]) -> None:
        assert self.counts is not None
        counts, self.counts = self.counts().T.tolist(), None
        self._add([self._everywhere(k, rows) if used[k] else None for k, rows in enumerate(counts)])
        self.local = [None] * len(self.params)
        for param in self.params:
            param.grad = None if param.grad is None else param.grad.coalesce()
        self.remember()

    def _everywhere(self, index: int, counts: Sequence[int]) -> Tensor:
        """The sum over ranks, added in rank order on every rank."""
        param, mine, rank = self.params[index], self.local[index], self.comm.rank
        bounds = [sum(counts[:k]) for k in range(len(counts) + 1)]
        size = param[0].numel()
        rows = torch.empty(bounds[-1], dtype=torch.int64, device=param.device)
        values = torch.empty(bounds[-1] * size, dtype=param.dtype, device=param.device)
        if mine is not None:
            rows[bounds[rank] : bounds[rank + 1]] = mine.indices()[0]
            values[bounds[rank] * size : bounds[rank + 1] * size] = mine.values().flatten()
        name = f"gradients/{self.name}/{index}"
        waits = [
            self.comm.all_gather(f"{name}/rows", rows, bounds),
            self.comm.all_gather(f"{name}/values", values, [bound * size for bound in bounds]),
        ]
        for pending in waits:
            pending.wait()
        values.mul_(1.0 / self.comm.world / self.root)
        return _sparse(rows, values.view(-1, *param.shape[1:]), param.shape)

    # The update.

    def update(self, step: Callable[[], Any]) -> Any:
        if not self.divided:
            return step()
        assert self.optimizer is not None
        pieces = self._pieces()
        self._refuse_edits()
        result = step_on(self.optimizer, self.params, pieces, step)
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self._agree(index, param)
        return result

    def _pieces(self) -> dict[int, Tensor]:
        """The rows this rank updates, with their part of the gradient; also where that has none of them."""
        out: dict[int, Tensor] = {}
        for index, param in enumerate(self.params):
            low, high = self.rows[index][self.comm.rank : self.comm.rank + 2]
            if param.grad is None or low == high:
                continue
            if not param.grad.is_sparse:
                raise UsageError(_dense(self.names[index]))
            grad = param.grad = param.grad.coalesce()
            first, last = torch.searchsorted(grad.indices()[0], torch.tensor([low, high], device=grad.device)).tolist()
            piece = param.detach()[low:high]
            piece.grad = _sparse(grad.indices()[0, first:last] - low, grad.values()[first:last], piece.shape).coalesce()
            out[index] = piece
        return out

    def _refuse_edits(self) -> None:
        """Refuse gradients that do not have the same rows everywhere: owners could not tell whom to send what."""
        rows = [param.grad.coalesce().indices()[0].cpu() if param.grad is not None else None for param in self.params]
        sums = [[-1, 0] if some is None else [len(some), int((some * 31 + 7).square().sum())] for some in rows]
        everywhere = self.comm.exchange(f"rows to update/{self.name}", torch.tensor(sums))
        for index, name in enumerate(self.names):
            if bool((everywhere[:, index] != everywhere[0, index]).any()):
                raise DesyncError(_uneven(name, everywhere[:, index, 0].tolist()))

    def _agree(self, index: int, param: nn.Parameter) -> None:
        """Give every rank the updated rows: all ranks know which these are."""
        assert param.grad is not None
        rows = param.grad.coalesce().indices()[0]
        owners = torch.tensor(self.rows[index], device=rows.device)
        size = param[0].numel()
        bounds = [place * size for place in torch.searchsorted(rows, owners).tolist()]
        table = param.detach()
        values = table.index_select(0, rows)
        self.comm.all_gather(f"updated rows/{self.name}/{index}", values.view(-1), bounds).wait()
        table.index_copy_(0, rows, values)

    def _held(self) -> list[Held]:
        out = []
        for param, name, rows in zip(self.params, self.names, self.rows, strict=True):
            whole = Slot(index=0, start=0, numel=param.numel(), shape=param.shape, stride=param.stride())
            mine = param.detach()[rows[self.comm.rank] : rows[self.comm.rank + 1]]
            out.append(Held(whole, mine, [row * param[0].numel() for row in rows], self.comm, name))
        return out

    def keeps(self, index: int) -> Kept:
        if not self.divided:
            return super().keeps(index)
        param, (low, high) = self.params[index], self.rows[index][self.comm.rank : self.comm.rank + 2]
        size = param[0].numel()
        shape = (high - low, *param.shape[1:])
        return Kept(low=low * size, high=high * size, stride=tuple(param.stride()), shape=shape)

    def whole_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        if not self.divided:
            return super().whole_state()
        assert self.optimizer is not None
        return gather_state(self.optimizer, self.params, self._held(), self.comm, whole=False)

    def take_state(self) -> None:
        if self.divided:
            assert self.optimizer is not None
            divide_state(self.optimizer, self.params, self._held(), whole=False)


def _sparse(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, tuple(shape), check_invariants=False)


def _uneven(name: str, counts: list[int]) -> str:
    said = ", ".join(f"rank {rank} {max(count, 0)}" for rank, count in enumerate(counts))
    return explain(
        f"the sparse gradient of {name!r} does not have the same rows on all ranks ({said})",
        "the same edits of p.grad on every rank",
        "edit p.grad on all ranks or on none",
    )


def _dense(name: str) -> str:
    return explain(
        f"the gradient of {name!r} is dense, though its module says sparse=True (it is used elsewhere too, or edited)",
        "a sparse gradient from every use of the table",
        "sparse=False, or use the table only through its module",
    )
