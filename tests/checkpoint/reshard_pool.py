"""Every plan and world to every other: `reshard_pool.py save|load FOLDER [kinds] [sources]`, run by each rank.

`save` trains a little under every plan and saves; what was saved is written beside it, taken from the state itself.
`load` reads every checkpoint under every plan into another model and compares all of it, to the bit; the number of
pairs and those that differ go to FOLDER/table.<world>.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.checkpoint.plain import Packer
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.menu import MENU
from distributedtorch.recipes import SYNCS

PLANS, DEVICE = tuple(name for name in SYNCS if MENU[name].traits.exact), os.environ.get("DEVICE", "cpu")


class Picture(nn.Module):
    """Channels last, BatchNorm, tied weights, an expanded buffer, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.into = nn.Linear(5, 7, bias=False)
        self.back = nn.Linear(7, 5, bias=False)
        self.back.weight = nn.Parameter(self.back.weight.detach())
        self.again = nn.Linear(5, 7)
        self.again.weight = self.into.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.randn(1, 4).expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(self.conv(x)).relu().mean(dim=(2, 3))
        return self.again(self.back(self.into(x))) * self.scale


class Words(nn.Module):
    """A table with sparse gradients, a frozen layer, a layer in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.small = nn.Linear(6, 9).bfloat16()
        self.out = nn.Linear(9, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.small(self.frozen(self.table(ids)).bfloat16()).float())


class Nested(torch.optim.Optimizer):
    """Its state holds tensors in lists, tuples and dicts."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            past = [*state.get("past", []), param.grad.clone()][-2:]
            state |= {"past": past, "sums": ({"rows": past[-1].sum(dim=1), 3: None}, 0.5)}
            param.sub_(sum(past), alpha=0.1)


def remember(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Nested state of the user's beside the one of an optimizer that works on pieces."""
    for state in optimizer.state.values():
        state["before"] = [state["momentum_buffer"].clone(), {"half": state["momentum_buffer"] / 2}]


def picture() -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], Tensor]]:
    model = Picture().to(DEVICE)
    head = [model.again.bias, model.scale]
    rest = [p for p in model.parameters() if all(p is not h for h in [*head, model.back.weight])]
    groups = [{"params": rest[:2], "lr": 1e-2}, {"params": rest[2:], "weight_decay": 0.1}]
    sgd = torch.optim.SGD(head, lr=0.1, momentum=0.9)
    sgd.register_step_post_hook(remember)
    optimizers = [torch.optim.AdamW(groups, amsgrad=True), sgd, Nested([model.back.weight])]
    return model, optimizers, lambda: torch.randn(8, 3, 6, 6).to(DEVICE)


def words() -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], Tensor]]:
    model = Words().to(DEVICE)
    dense = [*model.small.parameters(), *model.out.parameters()]
    optimizers = [torch.optim.Adafactor(dense, lr=0.01), torch.optim.SparseAdam([model.table.weight], lr=0.01)]
    return model, optimizers, lambda: torch.randint(0, 11, (8, 4)).to(DEVICE)


KINDS = {"picture": picture, "words": words}


def whole(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All of the state, as one process would hold it. A group call."""
    found = {f"m.{name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        state, packer = optimizer.state_dict(), Packer("optimizer")
        packed = json.dumps(packer.pack(dict(sorted(state["state"].items()))), sort_keys=True)
        found |= {f"o{number}.{name}": value for name, value in packer.tensors.items()}
        found[f"s{number}"] = torch.tensor(list(packed.encode()), dtype=torch.uint8)
        options = [[k, v] for group in state["param_groups"] for k, v in sorted(group.items()) if k != "params"]
        found[f"g{number}"] = torch.tensor(list(repr(options).encode()), dtype=torch.uint8)
    return {name: value.detach().cpu().clone().contiguous() for name, value in found.items()}


def save(folder: Path, kind: str, plan: str) -> None:
    torch.manual_seed(1)
    here().loop.steps = 0
    model, optimizers, rows = KINDS[kind]()
    model, *optimizers = dt.distribute(model, *optimizers, plan=plan, batches="own")
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rows()).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    name = f"{kind}-{plan}-{dt.world()}"
    dt.save(folder / name)
    state = whole(model, optimizers)
    if dt.is_main():
        save_file(state, folder / f"{name}.safetensors")
    dt.barrier()
    release()


def load(folder: Path, name: str, plan: str) -> list[str]:
    """What differs."""
    torch.manual_seed(2)
    model, optimizers, _ = KINDS[name.split("-", maxsplit=1)[0]]()
    model, *optimizers = dt.distribute(model, *optimizers, plan=plan, batches="own")
    dt.load(folder / name)
    found, expected = whole(model, optimizers), load_file(folder / f"{name}.safetensors")
    steps = here().loop.steps
    release()
    wrong = sorted(found.keys() ^ expected.keys())
    wrong += [k for k in found if k in expected and not _same(found[k], expected[k])]
    return wrong + ([] if steps == 3 * len(optimizers) else [f"steps {steps}"])


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main(what: str, folder: Path, kinds: list[str], sources: list[str]) -> None:
    torch.set_num_threads(1)
    if what == "save":
        for kind in kinds:
            for plan in PLANS:
                save(folder, kind, plan)
        return
    names = sorted(file.stem for file in folder.glob("*.safetensors") if not sources or file.stem in sources)
    table: dict[str, Any] = {}
    for name in names:
        for plan in PLANS:
            table[f"{name} -> {plan}-{dt.world()}"] = load(folder, name, plan)
    (folder / f"table.{dt.world()}.{dt.rank()}.json").write_text(json.dumps(table))


if __name__ == "__main__":
    given = sys.argv[3].split(",") if len(sys.argv) > 3 and sys.argv[3] else list(KINDS)
    main(sys.argv[1], Path(sys.argv[2]), given, sys.argv[4].split(",") if len(sys.argv) > 4 else [])
