"""Dense gradients of tables, of which a batch uses few rows (`nn.Embedding`): only rows that some rank used travel.

Each rank holds: the table, its gradient, optimizer state K Psi; where the wire's code needs it, what that left out.
Travels per step and rank: a byte per row, and 2c(N-1)/N for a code of c bytes of the rows that any rank used.

Which rows those are is read from the gradients, so a table may be used anywhere: one that all rows of are used travels
whole. Rows that nobody used stay zero, and what a code has left out of them waits until they are used again: sent
sooner, it would move weights that had no gradient, and optimizers that divide by a root mean square (Adam) by a lot.
Row r is summed by rank r modulo N, because tokens are often numbered by how frequent they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distributedtorch.core.comm import Comm, Pending
from distributedtorch.core.pairs import Posted, wait_all
from distributedtorch.core.sync import bytes_of
from distributedtorch.sync.alone import Alone
from distributedtorch.wire.feedback import Coded

_ROWS, _NUMBERS = 1024, 1 << 18
"""A table has at least so many: for fewer, an exchange of its own takes longer than it saves."""


def large_tables(models: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters that are worth it: weights of embeddings, and of nothing else (an output layer)."""
    modules = [module for model in models for module in model.modules()]
    uses = [id(param) for module in modules for param in module._parameters.values() if param is not None]
    dense = [m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and not m.sparse]
    large = {id(w) for w in dense if len(w) >= _ROWS and w.numel() >= _NUMBERS and w.device.type == "cpu"}
    return {one for one in large if uses.count(one) == 1}


def rows_used(grad: Tensor) -> Tensor:
    """Which rows of a table have a gradient, as bytes."""
    if grad.is_sparse:
        return torch.zeros(len(grad), dtype=torch.uint8, device=grad.device).index_fill_(0, grad._indices()[0], 1)
    rows = (torch.view_as_real(grad) if grad.is_complex() else grad).flatten(1)
    used = (rows.amax(dim=1) != 0) | (rows.amin(dim=1) != 0)  # NaN too; a norm takes ten times as long
    return used.to(torch.uint8)


class Rows(Alone):
    """Tables whose used rows are summed as a wire's codes."""

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
        wire: Coded,
    ) -> None:
        super().__init__(params, names, optimizer, comm)
        self.name, self.wire = name, wire
        self.under_way: list[_Table] = []

    def launch_rest(self) -> None:
        factor = 1.0 / self.comm.world / self.root
        self.under_way = [_Table(self.wire, f"gradients/{self.name}/{k}", p, factor) for k, p in enumerate(self.params)]

    def finish(self, used: Sequence[bool]) -> None:
        for one in self.under_way:
            one.pending.wait()
        self._add([one.grad if any_rank else None for one, any_rank in zip(self.under_way, used, strict=True)])
        self.under_way = []
        self.remember()

    def own_state(self) -> dict[str, Tensor]:
        return {f"wire/{name}": value for name, value in self.wire.state().items()}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.wire.take_state({name.removeprefix("wire/"): value for name, value in state.items()})

    def loaded(self) -> None:
        self.wire.take_state({})

    def bytes_held(self) -> dict[str, int]:
        return {**super().bytes_held(), "left out": sum(map(bytes_of, self.wire.state().values()))}


class _Table:
    """One table's sum under way. All of it after the first message is done by a thread: `grad` becomes the sum."""

    def __init__(self, wire: Coded, name: str, param: nn.Parameter, factor: float) -> None:
        self.wire, self.comm, self.name, self.factor = wire, wire.comm, name, factor
        self.grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
        param.grad = None
        self.key, self.draw = wire.begin(name)
        self.tags = [self.comm.pairs.tag(f"{name}/{part}") for part in ("codes", "sums")]
        used = rows_used(self.grad)
        self.comm.count_sent("small", len(used) * (self.comm.world - 1))
        self.used: Callable[[], Tensor] = self.comm.pairs.exchange(f"{name}/rows", used)
        posted = Posted()
        self.pending = Pending(self.comm, "all-reduce", name)
        self.pending.work = posted
        self.comm.pairs.progress.hand_over(posted, self._sum)

    def _sum(self) -> None:
        comm, code = self.comm, self.wire.code
        rows = self.used().amax(dim=0).nonzero().flatten()
        of_each = [rows[rows % comm.world == k] for k in range(comm.world)]
        width, dtype = self.grad[0].numel(), self.grad.dtype
        sizes = [code.bytes(len(some) * width, dtype) if len(some) else 0 for some in of_each]
        mine, none = comm.rank, torch.empty(0, dtype=torch.uint8)
        values = [self._values(some) for some in of_each]
        codes = [none if k == mine else self._code(some, values[k]) for k, some in enumerate(of_each)]
        parts = [none if k == mine else torch.empty(sizes[mine], dtype=torch.uint8) for k in range(comm.world)]
        comm.count_sent("all-reduce", sum(map(len, codes)) + sizes[mine] * (comm.world - 1))
        wait_all(comm.pairs.swap(self.tags[0], codes, parts))
        for part in parts if sizes[mine] else ():
            if len(part):
                code.add(part, values[mine], self.key)
        sums = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        sums[mine] = self._code(of_each[mine], values[mine])
        wait_all(comm.pairs.swap(self.tags[1], [sums[mine]] * comm.world, sums))
        for some, total, there in zip(of_each, sums, values, strict=True):
            if len(some):
                code.put(total, there, self.key)
                self.grad.index_copy_(0, some, there.view(-1, *self.grad.shape[1:]))

    def _values(self, rows: Tensor) -> Tensor:
        return self.grad.index_select(0, rows).flatten().mul_(self.factor)

    def _code(self, rows: Tensor, values: Tensor) -> Tensor:
        """A code of these rows and of what was left out of them before; what it leaves out is kept."""
        if not len(rows):
            return torch.empty(0, dtype=torch.uint8)
        if not self.wire.code.feedback:
            return self.wire.reduced(self.name, values, self.key, self.draw)
        kept, now = self.wire.left.get(self.name), f"{self.name}/now"
        if kept is None:
            kept = self.wire.left[self.name] = torch.zeros_like(self.grad)
        self.wire.left[now] = kept.index_select(0, rows).flatten()
        code = self.wire.reduced(now, values, self.key, self.draw)
        left = self.wire.left.pop(now, None)  # None: they were too large together
        kept.index_copy_(0, rows, torch.zeros_like(kept[rows]) if left is None else left.view(-1, *kept.shape[1:]))
        return code
