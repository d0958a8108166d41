"""Checkpoints of groups that have one order when saved and another one when loaded: `orders_pool.py FOLDER`.

Every rank compares a run that goes on with one that is loaded, and writes how far they are apart, and what is refused,
to FOLDER/<rank>.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.checkpoint import index
from distributedtorch.core.world import here
from distributedtorch.distribute import release

PLANS = ("ddp", "zero1", "zero3", "local(every=3)")


class Own(torch.optim.AdamW):
    """An optimizer with a state_dict of its own: parameters are numbered by position."""

    def state_dict(self):
        return {"mine": 1, **super().state_dict()}


class Training:
    """A run whose groups have an order of their own on every rank."""

    def __init__(self, plan: str, kind: type[torch.optim.Optimizer], order: int, *, given: bool = True) -> None:
        torch.manual_seed(0)
        here().loop.steps = 0
        x = torch.randn(24, 4, dtype=torch.float64)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.named = dict(net.named_parameters())
        names = sorted(self.named)[:: 1 if (dt.rank() + order) % 2 else -1]
        self.names = [[n for n in names if "weight" in n], [n for n in names if "bias" in n]]
        groups = [
            {"params": [self.named[n] for n in of], "lr": lr} for of, lr in zip(self.names, (0.01, 0.03), strict=True)
        ]
        loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 6)
        self.optimizer = kind(groups)
        self.model, self.loader = dt.distribute(net, loader, plan=plan)
        if given:
            dt.distribute(self.optimizer)

    def epoch(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimizer's state by name: `state_dict` numbers them in this rank's own order."""
        numbers = {n: k for k, n in enumerate(n for of in self.names for n in of)}
        state = self.optimizer.state_dict()["state"]
        found = {f"{n} {key}": value for n, k in numbers.items() for key, value in state[k].items()}
        return {k: v.clone() for k, v in {**found, **self.model.state_dict()}.items()}


def gap(folder: Path, plan: str, kind: type[torch.optim.Optimizer], *, given: bool = True) -> float:
    """The largest difference between a run that goes on and one loaded into groups of another order."""
    first = Training(plan, kind, 0, given=given)
    first.epoch()
    dt.save(folder)
    saved = first.state()
    first.epoch()
    went_on = first.state()
    release()
    other = Training(plan, kind, 1, given=given)
    dt.load(folder)
    pairs = [(saved, other.state())] if "local" not in plan else []  # where replicas differ, theirs are saved
    other.epoch()
    pairs.append((went_on, other.state()))
    release()
    return max(float((a[k] - b[k]).abs().max()) for a, b in pairs for k in a)


def refused(folder: Path, *, older: bool) -> str:
    """What is said of what ranks have of their own, saved by numbers of another order, or of an older version's."""
    Training("local(every=3)", torch.optim.AdamW, 0).epoch()
    dt.save(folder)
    release()
    if dt.is_main():
        (file,) = folder.glob("*/checkpoint.json")
        content = json.loads(file.read_text())["checkpoint"]
        syncs = content["run"].pop("syncs")
        content["run"] |= {} if older else {"syncs": [one[::-1] for one in syncs]}
        file.write_bytes(index.text(content))
    dt.barrier()
    Training("local(every=3)", torch.optim.AdamW, 0)
    try:
        dt.load(folder)
    except dt.CheckpointError as error:
        return str(error)
    finally:
        release()
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = [(plan, kind) for kind in (torch.optim.AdamW, Own) for plan in PLANS]
    if dt.world() == 1:
        cases = [case for case in cases if case[0] == "ddp"]
    gaps = {f"{plan} {kind.__name__}": gap(folder / f"{plan}-{kind.__name__}", plan, kind) for plan, kind in cases}
    adam = torch.optim.AdamW
    gaps |= {
        f"{plan} not given": gap(folder / f"{plan}-late", plan, adam, given=False)
        for plan in PLANS
        if dt.world() > 1 or plan == "ddp"
    }
    if dt.world() > 1:
        gaps |= {f"refused {older}": refused(folder / f"refused-{older}", older=older) for older in (False, True)}
    (folder / str(dt.rank())).write_text(json.dumps(gaps))


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]))
