"""What the processes of the saving tests run: `job.py FOLDER PART`. States go to FOLDER as tensors.

PART: `three`, `two` (saving and loading in a world of that size), `state of one rank`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch import behind
from distributedtorch.checkpoint import channel, writing
from distributedtorch.core.world import here
from distributedtorch.distribute import release


class Net(nn.Module):
    """Tied weights, BatchNorm's integers, and a buffer that is a view of another."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(6, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.back = nn.Linear(width, 6, bias=False)
        self.tied = nn.Linear(6, width)
        self.tied.weight = self.first.weight
        self.register_buffer("whole", torch.arange(8.0))
        self.register_buffer("part", self.whole[2:5])

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.back(self.norm(self.first(x)).tanh())).sum(dim=1)


class Training:
    """The user's script, up to the second line."""

    def __init__(self, plan: str, width: int = 16) -> None:
        torch.manual_seed(0)
        here().loop.steps = 0
        x = torch.randn(64, 6, dtype=torch.float64)
        net = Net(width).double()
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.8, 0.9))
        milestones = torch.optim.lr_scheduler.MultiStepLR(adam, [4, 12], 0.5)
        data = DataLoader(TensorDataset(x, x.sin().sum(dim=1)), 8)
        self.model, self.optimizer, self.loader, self.scheduler = dt.distribute(net, adam, data, milestones, plan=plan)

    def epoch(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()

    def keep(self, file: Path) -> None:
        """The whole state, taken without the library's files."""
        state = self.optimizer.state_dict()
        tensors = {f"m.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"o.{i}.{k}": v for i, values in state["state"].items() for k, v in values.items()}
        tensors["lr"] = torch.tensor([*self.scheduler.get_last_lr(), *state["param_groups"][0]["betas"]])
        if dt.is_main():
            save_file({k: v.clone().contiguous() for k, v in tensors.items()}, file)


def save(folder: Path, plan: str, name: str) -> None:
    training = Training(plan)
    training.epoch()
    dt.save(folder / name)
    training.keep(folder / f"{name}.saved")
    training.epoch()
    training.keep(folder / f"{name}.end")
    release()


def load(folder: Path, plan: str, name: str) -> None:
    training = Training(plan)
    dt.load(folder / name)
    training.keep(folder / f"{name}.loaded-{plan}-{dt.world()}")
    training.epoch()
    training.keep(folder / f"{name}.end-{plan}-{dt.world()}")
    release()


def refused(call, *args) -> str:
    try:
        call(*args)
    except dt.DistributedTorchError as error:
        return str(error)
    return ""


class Own:
    """An object of the user's; rank 1 cannot take its state back."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dt.rank() == 1:
            raise ValueError("not here")


def no_store(folder: Path) -> str:
    """Rank 1 cannot open the connection that it writes behind training with."""

    def refuse(_: float) -> NoReturn:
        raise dt.LaunchError("out of reach")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_SECONDS_BETWEEN_BEATS", 0.1)
        patch.setattr(channel, "_SECONDS_OF_SILENCE", 1.2)
        if dt.rank() == 1:
            patch.setattr(behind, "client", refuse)
        return refused(dt.save(folder / "kept", wait=False).wait)


def slow_disk(folder: Path) -> str:
    """Rank 1 writes for longer than a silent rank is waited for."""
    write = writing._write

    def slowly(*args, **more):
        time.sleep(2.0)
        return write(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_SECONDS_BETWEEN_BEATS", 0.1)
        patch.setattr(channel, "_SECONDS_OF_SILENCE", 1.2)
        if dt.rank() == 1:
            patch.setattr(writing, "_write", slowly)
        return refused(dt.save(folder / "slow", wait=False).wait)


def failures(folder: Path) -> dict[str, str]:
    """What goes wrong on rank 0 only, and what all ranks are told; training goes on after it."""
    training = Training("zero1")
    training.epoch()
    said = {"under a file": refused(dt.save, folder / "file" / "ckpt")}
    dt.save(folder / "kept")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dt.is_main():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    said["disk"] = refused(dt.save, folder / "kept")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dt.save(folder / "own", state={"own": Own()})
    said["own"] = refused(partial(dt.load, folder / "own", state={"own": Own()}))
    said["no store"], said["slow disk"] = no_store(folder), slow_disk(folder)
    values = [*training.optimizer.state.values()]
    for value in values:
        value["odd"] = [{3}]
    said["a set"] = refused(training.optimizer.state_dict)
    said["a set saved"] = refused(dt.save, folder / "kept")
    for value in values:
        del value["odd"]
    said["nothing there"] = refused(dt.load, folder / "nothing")
    said["one rank's own path"] = refused(dt.load, folder / ("kept" if dt.is_main() else "nothing"))
    training.epoch()
    said["steps"] = str(here().loop.steps)
    release()
    Training("zero1", width=17)
    said["another model"] = refused(dt.load, folder / "kept")
    release()
    return said


def one_rank_only(folder: Path, plan: str) -> dict[str, float]:
    training = Training(plan)
    training.epoch()
    dt.save(folder / f"twice-{plan}")
    began = time.monotonic()
    if dt.is_main():
        dt.save(folder / f"mid-{plan}")
        dt.save(folder / f"twice-{plan}")
    seconds = time.monotonic() - began
    training.epoch()
    release()
    return {plan: seconds}


def two(folder: Path) -> None:
    save(folder, "ddp", "ddp-2")
    save(folder, "zero2", "zero2-2")
    load(folder, "zero2", "zero1-3")
    load(folder, "zero1", "one")
    said = {**failures(folder), **one_rank_only(folder, "ddp"), **one_rank_only(folder, "zero1")}
    (folder / f"said.{dt.rank()}").write_text(json.dumps(said))
    training = Training("zero1")
    training.epoch()
    if dt.is_main():  # the other rank is at its end by then, and waits
        time.sleep(0.5)
        dt.save(folder / "exit-joined")
        dt.save(folder / "exit-model", model=training.model)


def three(folder: Path) -> None:
    save(folder, "zero1", "zero1-3")
    load(folder, "zero2", "one")
    training = Training("zero2")
    training.epoch()
    if dt.is_main():
        dt.save(folder / "exit-later")
    else:
        time.sleep(1.5)  # at its end only after rank 0's call has returned


def state_of_one_rank(folder: Path) -> None:
    training = Training("zero1")
    training.epoch()
    if dt.is_main():
        training.optimizer.state_dict()
    training.epoch()


if __name__ == "__main__":
    {"two": two, "three": three, "state of one rank": state_of_one_rank}[sys.argv[2]](Path(sys.argv[1]))
