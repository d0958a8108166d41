"""What each process of the facade's tests runs: objects that change plan while they train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from tests.conformance.cases import difference

PLANS = ("ddp", "zero3", "zero1", "ddp")
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=4e-3, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
}
Objects = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]


class Net(nn.Module):
    """Convolution, BatchNorm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.layers = nn.ModuleList(nn.Linear(3 * 36, 3 * 36, bias=False) for _ in range(2))
        self.out = nn.Linear(3 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x.view(-1, 1, 8, 8)))).flatten(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def make(optimizer: str) -> Objects:
    torch.manual_seed(3)
    x, y = torch.randn(17, 64), torch.randint(0, 5, (17,))  # batches of 7: the last has 3 rows
    model = Net()
    return model, OPTIMIZERS[optimizer](model.parameters()), DataLoader(TensorDataset(x, y), 7, shuffle=True)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything a loop leaves behind, the gradients shown included."""
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        kept |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in values.items()}
    kept |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return kept


def marks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How much of the library is on the user's objects."""
    params = list(model.parameters())
    return {
        "gradient hooks": sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in params)
        + sum(len(p._backward_hooks or ()) for p in params),
        "forward hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()),
        "methods": sum("forward" in vars(m) for m in model.modules())
        + sum(name in vars(optimizer) for name in ("step", "state_dict", "load_state_dict")),
        "classes": sum(type(p) is not nn.Parameter for p in params),
        "members": len(here().loop.members),
        "iterates": int(DataLoader.__iter__.__module__ != "torch.utils.data.dataloader"),
        "backward": int(torch.autograd.backward.__module__ != "torch.autograd"),
    }


def plain(optimizer: str, phases: int) -> dict[str, Tensor]:
    objects = make(optimizer)
    for _ in range(2 * phases):
        epoch(*objects)
    return state(*objects[:2])


def by_release(optimizer: str) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """One plan after the other on the same objects, then plainly in each process."""
    model, opt, loader = make(optimizer)
    found = []
    for plan in PLANS:
        model.zero_grad()
        _, _, divided = dt.distribute(model, opt, loader, plan=plan)
        for _ in range(2):
            epoch(model, opt, divided)
        release()
        found.append(marks(model, opt))
    for _ in range(2):
        epoch(model, opt, loader)
    return state(model, opt), found


def rows_seen(model: nn.Module, loader: DataLoader[Any]) -> dict[str, int]:
    """Rows of the first batch, as the loop gets them in each mode; the optimizer is left alone."""
    seen = {"training": len(next(iter(loader))[0])}
    with torch.no_grad():
        seen["no_grad"] = len(next(iter(loader))[0])
    model.eval()
    seen["eval"] = len(next(iter(loader))[0])
    model.train()
    return seen


def by_facade(optimizer: str) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """The documents' calls, again and again on the same objects; the loader is never passed."""
    model, opt, loader = make(optimizer)
    found = []
    for plan in PLANS:
        dist = dt.DistributedPyTorch(strategy=plan)
        dist.setup(model, opt, "cpu")
        for _ in range(2):
            dist.launch()
            epoch(model, opt, loader)
            dist.barrier()
        dist.join()
        found.append(marks(model, opt))
    after = state(model, opt)
    dist.launch()
    found.append(rows_seen(model, loader))
    dist.barrier()
    found.append({"after the barrier": len(next(iter(loader))[0])})
    dist.setup(model, opt, "cpu", loader)
    dist.launch()
    other = DataLoader(loader.dataset, 7)
    found.append({"named": len(next(iter(loader))[0]), "not named": len(next(iter(other))[0])})
    release()
    return after, found


def by_topk(optimizer: str) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """A step run by the strategy that leaves something out between hosts, beside the plan it stands for."""

    def train(run: Any, model: nn.Module, opt: torch.optim.Optimizer, loader: Any) -> dict[str, Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        for _ in range(4):
            for batch in loader:
                run(step, batch)
        after = state(model, opt)
        release()
        return after

    strategy = dt.Strategy("topk")
    with strategy.scope():
        objects = make(optimizer)
    found = train(strategy.run, *objects)
    planned = train(
        lambda step, batch: step(*batch), *dt.distribute(*make(optimizer), plan="ddp,wire=topk(0.01,hosts)")
    )
    gap = {what: difference(other, found)[0] for what, other in (("plan", planned), ("dense", plain(optimizer, 2)))}
    return {}, [{"as planned": int(gap["plan"] == 0), "as one process": int(gap["dense"] < 1e-9)}]


def in_turns(_: str) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """Who goes when through a block that rank 0 goes through first, where ranks are on two hosts."""
    here().local_rank, here().local_size = dt.rank() % 2, 2
    with dt.main_first(), Path("turns").open("a") as log:
        print(dt.rank(), file=log, flush=True)
    dt.barrier()
    return {}, [{"place": Path("turns").read_text().split().index(str(dt.rank()))}]


def by_saving(optimizer: str) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """A save that one rank asked for alone is not lost when the plan changes before the next step."""
    model, opt, loader = make(optimizer)
    for plan in PLANS[:2]:
        dt.DistributedPyTorch(plan).setup(model, opt)
        dt.DistributedPyTorch().launch()
        epoch(model, opt, loader)
        epoch(model, opt, loader)
    after = state(model, opt)
    if dt.is_main():
        dt.save("alone")
    dt.DistributedPyTorch("ddp").setup(model, opt)
    release()
    saved = next(Path("alone").glob("*-step-*"))
    return after, [{"steps since": here().loop.steps - int(saved.name.split("-")[-1])}]


WAYS = {
    "release": (by_release, 5),
    "facade": (by_facade, 4),
    "topk": (by_topk, 0),
    "turns": (in_turns, 0),
    "saving": (by_saving, 2),
}


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    said: dict[str, Any] = {}
    for name in names:
        way, optimizer = name.split("/")
        train, phases = WAYS[way]
        result, found = train(optimizer)
        gap, where = difference(plain(optimizer, phases), result) if phases else (0.0, "")
        said[name] = {"gap": gap, "where": where, "found": found}
    (folder / f"said.{dt.rank()}").write_text(json.dumps(said))


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), *sys.argv[2:])
