"""What each process of a pool runs: what only zero3 does, each against one process. A fault raises."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.core.errors import DesyncError
from distributedtorch.core.world import here
from distributedtorch.distribute import release

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.gelu(self.one(self.norm(x))))


class Net(nn.Module):
    """Embedding tied to the head, blocks, a parameter of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 23, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        ids = torch.randint(0, 23, (4, 6), generator=draw)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("_orig_mod."): value.detach().clone() for name, value in model.state_dict().items()}


def built(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    with torch.device(device):
        model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-9)) for name in one)


def initialised() -> nn.Module:
    """What one process makes of a model on the meta device: every module fills itself, in order."""
    model, _ = built("meta")
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight  # to_empty unties
    for module in model.modules():
        if hasattr(module, "reset_parameters") and module is not model.head:
            module.reset_parameters()
    return model


def meta_models_fill_themselves() -> None:
    model = initialised()
    truth = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model, optimizer = dt.distribute(*built("meta"), plan="zero3")
    assert gap(truth, train(model, optimizer)) <= 1e-9


def meta_models_are_filled_from_a_file() -> None:
    model, optimizer = built()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({k: v.clone() for k, v in model.state_dict().items() if k != "head.weight"}, file)
        truth = train(model, optimizer)
        model, optimizer = dt.distribute(*built("meta"), plan="zero3", weights=file)
    assert gap(truth, train(model, optimizer)) <= 1e-9


def compiled_whole_or_by_block() -> None:
    truth = train(*built())
    model, optimizer = dt.distribute(*built(), plan="zero3")
    torch.compiler.reset()
    assert gap(truth, train(torch.compile(model, backend="aot_eager"), optimizer)) <= 1e-9  # type: ignore[arg-type]
    release()
    model, optimizer = dt.distribute(*built(), plan="zero3")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert gap(truth, train(model, optimizer)) <= 1e-9


def a_rank_holds_its_share() -> None:
    model, optimizer = dt.distribute(*built(), plan="zero3")
    train(model, optimizer)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    held = dt.stats().bytes_held
    room = 16 * dt.world() * 8 * len(here().loop.members[0].sync.memory.units)  # type: ignore[attr-defined]
    assert held["parameters"] <= total / dt.world() + room, (held, total)


def changes_on_one_rank_are_named() -> None:
    model, optimizer = dt.distribute(*built(), plan="zero3")
    if dt.is_main():
        with torch.no_grad():
            model.blocks[1].one.bias.add_(1.0)
    with pytest.raises(DesyncError, match=r"blocks\.1.*some ranks only"):
        optimizer.step()


def blocks_may_be_named() -> None:
    truth = train(*built())
    for name, together in (("Net", True), ("Linear", False)):
        model, optimizer = dt.distribute(*built(), plan=f"zero3,block={name}")
        assert gap(truth, train(model, optimizer)) <= 1e-9
        units = {id(p): unit for unit in here().loop.members[0].sync.memory.units for p in unit.params}  # type: ignore[attr-defined]
        one, two = units[id(model.blocks[1].one.weight)], units[id(model.blocks[1].two.weight)]
        assert (two in one.mates) is together
        release()


class Shrinks(nn.Linear):
    """Changes its weight in its forward, in one of two ways."""

    through_data = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).mul_(0.5)
        return super().forward(x)


def changes_inside_a_forward_are_refused() -> None:
    for through_data in (False, True):
        layers = nn.Sequential(Shrinks(6, 6), Shrinks(6, 6))
        layers[0].through_data = layers[1].through_data = through_data
        model, _ = dt.distribute(layers, torch.optim.SGD(layers.parameters(), lr=0.1), plan="zero3")
        with pytest.raises(dt.UsageError, match=r"0\.(weight|bias).*inside the forward"):
            model(torch.ones(2, 6))
        release()


CHECKS: tuple[Callable[[], None], ...] = (
    meta_models_fill_themselves,
    meta_models_are_filled_from_a_file,
    compiled_whole_or_by_block,
    a_rank_holds_its_share,
    blocks_may_be_named,
    changes_inside_a_forward_are_refused,
    changes_on_one_rank_are_named,
)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for check in CHECKS:
        if not names or check.__name__ in names:
            check()
            if check is not changes_on_one_rank_are_named:  # after it the ranks are not in step
                release()


if __name__ == "__main__":
    dt.barrier()
    main(sys.argv[1:])
