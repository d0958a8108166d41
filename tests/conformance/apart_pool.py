"""What each process of a job with servers of their own runs: beside ddp, servers beside ranks, and a history by hand.

`-m tests.conformance.apart_pool FOLDER PLAN [SABOTAGE]`: faults raise. A job has servers of their own once; when its
workers have released them they go on as a world without.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.serve.board import Board, Event
from distributedtorch.serve.shard import Shard
from distributedtorch.sync.served import Served
from tests.conformance.loose_pool import compare
from tests.conformance.server_pool import STEPS, again, loss_of, rows_of
from tests.serve.history import staleness

Step = Callable[[], None]


def net(seed: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(23, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=5)


def optimizer_for(model: nn.Module, plan: str) -> torch.optim.Optimizer:
    if "updates" in plan:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(folder: Path, plan: str, seed: int) -> list[list[Tensor]]:
    """Parameters after one epoch, saved there; after another; after the same again from what was saved."""
    model = net(seed, "meta" if "own" in plan else "cpu")
    optimizer = optimizer_for(model, plan)
    scheduler = StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = dt.distribute(model, optimizer, data(), scheduler, plan=plan)

    def epoch() -> list[Tensor]:
        for step, (x, y) in enumerate(loader):
            if step == 3 and "updates" not in plan:  # parameters alone, as a model with other values is put back
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        dt.sync()
        return [param.detach().clone() for param in model.parameters()]

    found = [epoch()]
    dt.save(folder)
    found.append(epoch())
    if "updates" not in plan:
        state = optimizer.state_dict()["state"]
        assert len(state) == 4 and all("exp_avg" in one for one in state.values()), "state is with the servers only"
    dt.load(folder)
    found.append(epoch())
    if "apart" in plan and "updates" not in plan:
        assert not optimizer.state, "state that was shown or loaded is kept on a worker"
    return found


def resumed(folder: Path, plan: str) -> list[Tensor]:
    """The second epoch under another plan, from what was saved."""
    model = net(99)
    optimizer = optimizer_for(model, plan)
    scheduler = StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = dt.distribute(model, optimizer, data(), scheduler, plan="ddp")
    dt.load(folder)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    release()
    return [param.detach().clone() for param in model.parameters()]


def rounds(folder: Path, plan: str) -> None:
    """Servers of their own do what servers beside ranks do, to the bit; and without a wire that is ddp."""
    servers, processes = Plan.parse(plan).apart, dt.world()
    found = trained(folder / "apart", plan, seed=dt.rank())  # every process has other values: rank 0's count
    (folder / f"after.{os.environ['RANK']}").touch()
    assert (dt.rank(), dt.world()) == (int(os.environ["RANK"]), processes - servers)
    sync = here().loop.members[0].sync
    assert isinstance(sync, Served) and sync.desk is None and dt.stats().backlog == 0
    with pytest.raises(dt.UsageError, match="have taken over what the first one gave"):
        model = net(0)
        dt.distribute(model, optimizer_for(model, plan), plan=plan)
    release()
    with pytest.raises(dt.PlanError, match=f"{dt.world() + 1} servers given for {dt.world()} process"):
        dt.distribute(model, optimizer_for(model, plan), plan=f"server(servers={dt.world() + 1})")
    if dt.world() > 1:
        one_server = plan.replace("servers=2,", "") if dt.world() < servers else plan
        truth = trained(folder / "beside", one_server.replace("apart,", ""), seed=0)
        release()
        for epoch, (mine, beside) in enumerate(zip(found, truth, strict=True)):
            same = all(torch.equal(a, b) for a, b in zip(mine, beside, strict=True))
            assert same, f"{plan}: not what servers beside ranks give, in epoch {epoch}"
    compare("dt.load", found[1], found[2])
    if "wire" not in plan and "every" not in plan and "own" not in plan:
        ddp = trained(folder / "ddp", "ddp", seed=0) if "updates" not in plan else by_sgd(folder)
        release()
        for mine, other in zip(found, ddp, strict=True):
            compare(f"{plan} is ddp", other, mine)
    if "updates" not in plan and "wire" not in plan:
        compare("a checkpoint under ddp", found[1], resumed(folder / "apart", plan))


def by_sgd(folder: Path) -> list[list[Tensor]]:
    """As `trained` under ddp, for plain SGD."""
    model = net(0)
    optimizer = optimizer_for(model, "updates")
    scheduler = StepLR(optimizer, 2, 0.5)
    found = []
    for _ in range(2):
        for x, y in data():
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in model.parameters()])
    return [*found, found[1]]


def history(folder: Path, plan: str) -> None:
    """What the server noted, played again by hand, gives the same parameters."""
    bound = Plan.parse(plan).options("server")["staleness"]
    note = (folder / "events").open("a", buffering=1)
    made = Board.__init__

    def noted(self: Board, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]
        self.note = lambda event: print(json.dumps(asdict(event)), file=note)

    Board.__init__ = noted  # type: ignore[method-assign]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = dt.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
    for step in range(1, STEPS + 1):
        loss_of(model, rows_of(step, dt.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    (folder / f"after.{os.environ['RANK']}").touch()
    if dt.is_main():
        events = [Event(**json.loads(line)) for line in (folder / "events").read_text().splitlines()]
        late = staleness(events)
        assert len(late) == STEPS * dt.world()
        assert max(late) <= bound, f"{plan}: a push of staleness {max(late)}"
        compare(plan, again(events), list(model.parameters()))


def sabotage(how: str) -> None:
    """Break what is tested."""
    if how == "own values":
        Served._fill = lambda self, **_: None  # type: ignore[method-assign]
    elif how == "state again":
        Served.loaded = lambda self: vars(self).update(refilled=True, restated=True)  # type: ignore[method-assign]
    elif how == "own rates":
        Shard.follow = lambda self, pushes: None  # type: ignore[method-assign]
    elif how == "no state":
        Served._publish = lambda self: None  # type: ignore[method-assign]
    elif how == "no bound":
        Board._may_apply = lambda self: True  # type: ignore[method-assign]


def main(folder: Path, plan: str, how: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sabotage(how)
    (rounds if "staleness=0" in plan else history)(folder, plan)
    dt.print("servers of their own as written out")


if __name__ == "__main__":
    with dt.main_first():
        pass  # processes may meet before: then all of them do
    main(Path(sys.argv[1]), sys.argv[2], [*sys.argv, ""][3])
