"""Users' loops with sparse gradients and sparse batches: as those of `loops`, and added to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conformance.loops import DEVICE, LOOPS, Distribute, loop

__all__ = ["LOOPS"]
ROWS = 31


class Reader(nn.Module):
    """Two tables of which a batch uses few rows, one of them rarely used at all, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 6, padding_idx=0, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, 6, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        self.to(DEVICE)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1)
        rare = (ids > 3 * ROWS // 4).any(1).nonzero()[:, 0]
        if len(rare):
            x = x.index_add(0, rare, self.bags(ids[rare]))
        out: Tensor = self.head(x)
        return out


def texts(n: int = 23, batch: int = 5) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, ROWS, (n, 3), generator=generator)
    ids[: n // 2] %= 3 * ROWS // 4
    return DataLoader(TensorDataset(ids.to(DEVICE), ids[:, :2].double().sin().to(DEVICE)), batch, shuffle=True)


def read(distribute: Distribute, optimizers: Callable[[Reader], list[Any]], words: str = "", every: int = 1) -> Any:
    """Train the reader; what is asked of a plan's words is done by hand where there is no plan."""
    model = Reader()
    given = optimizers(model)
    model, *given, data = distribute(model, *given, texts(), words=words)
    by_hand = words if "step" not in vars(given[0]) else ""
    for _ in range(3):
        batches = list(data) if by_hand else data
        for number, (ids, y) in enumerate(batches):
            first = number // every * every
            window = batches[first : first + every] if by_hand else []  # type: ignore[index]
            part = len(ids) / sum(len(x) for x, _ in window) if window else 1.0
            (part * F.mse_loss(model(ids), y)).backward()
            if by_hand and number + 1 < first + len(window):
                continue
            if by_hand and "clip" in by_hand:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                total = sum(float(g.norm()) ** 2 for g in grads) ** 0.5
                for grad in grads:
                    grad.mul_(min(1.0, 0.05 / (total + 1e-6)))
            for optimizer in given:
                optimizer.step()
                optimizer.zero_grad()
    state = {f"{o}.{k}": torch.as_tensor(v) for o, opt in enumerate(given) for k, v in flat(opt.state_dict()).items()}
    return {**model.state_dict(), **state}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    values = {f"{n}.{k}": v for n, one in state["state"].items() for k, v in one.items() if v is not None}
    return {k: v.to_dense() if isinstance(v, Tensor) else v for k, v in values.items()}


def split(model: Reader) -> list[Any]:
    tables = [*model.words.parameters(), *model.bags.parameters()]
    return [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(model.head.parameters(), lr=0.01)]


@loop
def tables_under_sparse_adam(distribute: Distribute) -> Any:
    return read(distribute, split)


@loop
def tables_under_adagrad(distribute: Distribute) -> Any:
    return read(distribute, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1)])


@loop
def tables_under_sgd(distribute: Distribute) -> Any:
    return read(distribute, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)])


@loop
def tables_in_windows(distribute: Distribute) -> Any:
    return read(distribute, split, ",accumulate=2", every=2)


@loop
def tables_in_windows_clipped(distribute: Distribute) -> Any:
    words = ",accumulate=3,clip=0.05"
    return read(distribute, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], words, every=3)


@loop
def tables_in_windows_by_hand(distribute: Distribute) -> Any:
    model = Reader()
    opt: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model, opt, data = distribute(model, opt, texts())
    for number, (ids, y) in enumerate(list(data) * 3):
        F.mse_loss(model(ids), y).backward()
        if number % 4 == 1:
            assert model.words.weight.grad is not None
            model.words.weight.grad = model.words.weight.grad * 0.5
        if number % 4 == 3:
            opt.step()
            opt.zero_grad(set_to_none=number % 8 == 3)
    return model


@loop
def tables_loaded_before_and_after(distribute: Distribute) -> Any:
    model, later = Reader(), Reader()
    opts = split(model)
    ids, y = next(iter(texts()))
    F.mse_loss(model(ids), y).backward()
    for opt in opts:
        opt.step()
        opt.zero_grad()
    model, *opts, data = distribute(model, *opts, texts())
    kept = None
    for number, (x, y) in enumerate(list(data) * 2):
        F.mse_loss(model(x), y).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if number == 3:
            kept = [copy.deepcopy(opt.state_dict()) for opt in opts]
        if number == 5:
            for opt, state in zip(opts, kept or [], strict=True):
                opt.load_state_dict(state)
    later.load_state_dict(model.state_dict())
    return later


@loop
def sparse_batches(distribute: Distribute) -> Any:
    """Batches in COO and in CSR, made by a collate_fn."""
    model = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 2)).to(DEVICE)
    weight = nn.ParameterList([nn.Parameter(torch.randn(40, 12) / 6)]).to(DEVICE)
    both = nn.ModuleList([model, weight])
    opt: torch.optim.Optimizer = torch.optim.AdamW(both.parameters(), lr=0.01)
    x = torch.randn(23, 40, generator=torch.Generator().manual_seed(2)) * (torch.arange(40) % 5 == 0)

    def collate(numbers: list[int]) -> dict[str, Tensor]:
        rows = x[torch.tensor(numbers)]
        layout = torch.sparse_csr if len(numbers) % 2 else torch.sparse_coo
        return {"x": rows.to(DEVICE).to_sparse(layout=layout), "y": rows[:, :2].sin().to(DEVICE)}

    both, opt, data = distribute(both, opt, DataLoader(range(23), 5, shuffle=True, collate_fn=collate))  # type: ignore[arg-type]
    for _ in range(2):
        for batch in data:
            hidden = torch.sparse.mm(batch["x"], both[1][0])  # type: ignore[index]
            F.mse_loss(both[0](hidden), batch["y"]).backward()
            opt.step()
            opt.zero_grad()
    return both


@loop
def whole_sparse_batches(distribute: Distribute) -> Any:
    """Batches that come from no DataLoader, so that they are cut into rows."""
    model = nn.ParameterList([nn.Parameter(torch.randn(40, 2) / 6)]).to(DEVICE)
    opt: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(23, 40, generator=torch.Generator().manual_seed(2)) * (torch.arange(40) % 5 == 0)
    layouts = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
    parts = [
        (part.to(DEVICE).to_sparse(layout=layouts[n % 3]), part[:, :2].to(DEVICE)) for n, part in enumerate(x.split(5))
    ]
    model, opt, data = distribute(model, opt, parts)
    for _ in range(2):
        for rows, y in data:
            F.mse_loss(torch.sparse.mm(rows, model[0]), y).backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def tables_in_windows_unused_at_first(distribute: Distribute) -> Any:
    return in_turns(distribute, 0)


@loop
def tables_in_windows_unused_at_last(distribute: Distribute) -> Any:
    return in_turns(distribute, 1)


def in_turns(distribute: Distribute, without: int) -> Any:
    """Windows of two batches of which one uses neither the table nor the second optimizer's head; nothing zeroed."""
    model = nn.ModuleList([nn.Embedding(ROWS, 6, sparse=True), nn.Linear(6, 2), nn.Linear(6, 2)]).to(DEVICE)
    opts: list[Any] = [torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)]
    opts.append(torch.optim.SGD(model[2].parameters(), lr=0.1))
    model, *opts, data = distribute(model, *opts, texts(), words=",accumulate=2")
    by_hand = "step" not in vars(opts[0])
    batches = list(data) if by_hand else data
    for number, (ids, y) in enumerate(batches):
        first = number // 2 * 2
        window = batches[first : first + 2] if by_hand else []  # type: ignore[index]
        part = len(ids) / sum(len(x) for x, _ in window) if window else 1.0
        used = number % 2 != without
        x = model[0](ids).mean(1) if used else torch.ones(len(ids), 6, device=DEVICE)
        (part * F.mse_loss(model[1](x) + (model[2](x) if used else 0.0), y)).backward()
        if by_hand and number + 1 < first + len(window):
            continue
        for opt in opts:
            opt.step()
        if number in (1, 3, 4):  # the ends of windows
            opts[number % 3 != 1].zero_grad()
    return model
