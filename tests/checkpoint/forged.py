"""Indexes with right hashes and wrong content, made of a real checkpoint's; and a run with all of its state.

`INDEXES` are refused; `systematic` is every place with every one of some values, which are refused or do no harm.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributedtorch as dt
from distributedtorch.checkpoint import index
from distributedtorch.core.world import here
from distributedtorch.distribute import release
from distributedtorch.run import RUN
from tests.checkpoint.job import Net

# A run, and all of its state.


class Own:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count, self.weights = 3, torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights, "history": [1, (2, 3)], "by number": {1: 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weights = state["count"], state["weights"]


class Training:
    """A script with a scheduler, a shuffled loader with a generator of its own, and an object of the user's."""

    def __init__(self) -> None:
        release()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        here().loop.steps = 0
        x = torch.randn(64, 6, dtype=torch.float64)
        net = Net(16).double()
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        milestones = torch.optim.lr_scheduler.MultiStepLR(adam, [4, 12], 0.5)
        generator = torch.Generator()
        generator.manual_seed(3)
        data = DataLoader(TensorDataset(x, x.sin().sum(dim=1)), 8, shuffle=True, generator=generator)
        self.model, self.optimizer, self.loader, self.scheduler = dt.distribute(net, adam, data, milestones, plan="ddp")
        self.own, self.generator = Own(), generator
        self.batches: Iterator[Any] = iter(())

    def train(self, batches: int) -> None:
        """So many batches, the last one in the middle of an epoch that goes on."""
        for _ in range(batches):
            try:
                x, y = next(self.batches)
            except StopIteration:
                self.batches = iter(self.loader)
                x, y = next(self.batches)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, folder: Path) -> Path:
        """Its checkpoint.json, of a save in the middle of an epoch."""
        return Path(dt.save(folder, state={"own": self.own}).path) / "checkpoint.json"

    def load(self, folder: Path) -> None:
        dt.load(folder, state={"own": self.own})
        self.batches = iter(self.loader)

    def state(self) -> dict[str, Any]:
        """Everything that a load may change, to the bit."""
        place = self.loader.place
        plain = {name: value for name, value in vars(self.scheduler).items() if name != "optimizer"}
        return {
            "model": bits(dict(self.model.state_dict())),
            "optimizer": bits(self.optimizer.state_dict()),
            "scheduler": bits(plain),
            "loader": bits([place.cursor.state_dict(), place._goes_on, place._later, place._began]),
            "generator": bits(self.generator.get_state()),
            "order": None if RUN.stream is None else bits(list(RUN.stream.state)),
            "random": (bits(torch.get_rng_state()), random.getstate(), bits(np.random.get_state(legacy=False))),
            "run": (here().loop.steps, RUN.fed, bits(RUN.unclaimed), RUN.seed),
            "own": (self.own.count, bits(self.own.weights)),
        }


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), whole.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(repr(key), bits(inside)) for key, inside in value.items()]
    return [type(value), *map(bits, value)] if isinstance(value, list | tuple) else repr(value)


# Indexes.


Content = dict[str, Any]


def adam(content: Content) -> Any:
    return content["run"]["optimizers"][0]


def param(content: Content) -> Any:
    return adam(content)["state"]["model.0/first.weight"]


def options(content: Content) -> Any:
    return adam(content)["groups"][0]["options"]


def loader(content: Content) -> Any:
    return content["run"]["loaders"][0]


def began(content: Content) -> Any:
    return loader(content)["began"]


def scheduler(content: Content) -> Any:
    return content["run"]["schedulers"][0]["state"]


def nested(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


FIRST = {"$tensor": "model.0/first.weight"}
SHORT = "AAAA"
INDEXES: dict[str, Callable[[Content], Any]] = {
    "plan is a number": lambda c: c.update(plan=5),
    "plan is nothing": lambda c: c.pop("plan"),
    "world is text": lambda c: c.update(world="1"),
    "world is none": lambda c: c.update(world=0),
    "step is negative": lambda c: c.update(step=-1),
    "step is a fraction": lambda c: c.update(step=1.5),
    "step has twenty digits": lambda c: c.update(step=10**20),
    "bucket bytes are a list": lambda c: c.update({"bucket bytes": [1]}),
    "format is true": lambda c: c.update(format=True),
    "models are a dict": lambda c: c["run"].update(models={}),
    "schedulers are a dict": lambda c: c["run"].update(schedulers={}),
    "loaders are a dict": lambda c: c["run"].update(loaders={}),
    "no optimizers": lambda c: c["run"].pop("optimizers"),
    "user state is a list": lambda c: c["run"].update(user=[]),
    "metadata of a module is text": lambda c: c["run"]["models"][0]["metadata"].update(norm="x"),
    "version of a module is text": lambda c: c["run"]["models"][0]["metadata"]["norm"].update(version="x"),
    "buffers that would be replaced": lambda c: c["run"]["models"][0]["metadata"]["norm"].update(
        assign_to_params_buffers=True
    ),
    "metadata with a key of its own": lambda c: c["run"]["models"][0].update(metadata={"$dict": [[1, {}]]}),
    "options are a list": lambda c: adam(c)["groups"][0].update(options=[]),
    "options name parameters": lambda c: options(c).update(params=[]),
    "lr is text": lambda c: options(c).update(lr="x"),
    "lr is a matrix": lambda c: options(c).update(lr=FIRST),
    "lr has thirty digits": lambda c: options(c).update(lr=10**30),
    "one beta": lambda c: options(c).update(betas={"$tuple": [0.9]}),
    "betas are a number": lambda c: options(c).update(betas=0.9),
    "capturable is a matrix": lambda c: options(c).update(capturable=FIRST),
    "fused is a matrix": lambda c: options(c).update(fused=FIRST),
    "an unknown option is a matrix": lambda c: options(c).update(other=FIRST),
    "another group": lambda c: adam(c)["groups"].append(copy.deepcopy(adam(c)["groups"][0])),
    "an optimizer's own way": lambda c: adam(c).update(whole={}),
    "state is a list": lambda c: adam(c).update(state=[]),
    "a parameter's state is a number": lambda c: adam(c)["state"].update({"model.0/first.weight": 7}),
    "no step": lambda c: param(c).pop("step"),
    "a step that is a matrix": lambda c: param(c).update(step=FIRST),
    "a step that is text": lambda c: param(c).update(step="x"),
    "no exp_avg": lambda c: param(c).pop("exp_avg"),
    "exp_avg is a number": lambda c: param(c).update(exp_avg=1),
    "exp_avg of another parameter": lambda c: param(c).update(
        exp_avg=adam(c)["state"]["model.0/norm.weight"]["exp_avg"]
    ),
    "other state is a number": lambda c: adam(c).update(other=1),
    "a scheduler's state is a number": lambda c: c["run"]["schedulers"][0].update(state=3),
    "milestones are none": lambda c: scheduler(c).update(milestones=None),
    "gamma is a matrix": lambda c: scheduler(c).update(gamma=FIRST),
    "a scheduler's step": lambda c: scheduler(c).update(step=5),
    "a scheduler's optimizer": lambda c: scheduler(c).update(optimizer=5),
    "user state is text": lambda c: c["run"]["user"].update(own="x"),
    "user state without a key": lambda c: c["run"]["user"]["own"].pop("count"),
    "user state a thousand levels deep": lambda c: c["run"]["user"].update(own=nested(900)),
    "user state 201 levels deep": lambda c: c["run"]["user"]["own"].update(more=nested(201)),
    "tensors over and over": lambda c: c["run"]["user"].update(
        own={"count": 1, "weights": {"$tuple": [{"$dict": [[k, FIRST]]} for k in range(3)]}},
        **{f"o{k}": FIRST for k in range(100_000)},
    ),
    "a cursor that is a list": lambda c: loader(c).update(cursor=[]),
    "a cursor without samples": lambda c: loader(c)["cursor"].pop("samples"),
    "2**60 batches": lambda c: loader(c)["cursor"].update(batch=1 << 60, batches=1 << 60),
    "more batches in an epoch than in all": lambda c: loader(c)["cursor"].update(batch=40),
    "a batch that is text": lambda c: loader(c)["cursor"].update(batch="1"),
    "an epoch that is nothing": lambda c: loader(c)["cursor"].update(epoch=None),
    "ended is a number": lambda c: loader(c)["cursor"].update(ended=0),
    "generators are text": lambda c: loader(c).update(generators="xy"),
    "a generator's state is short": lambda c: loader(c).update(generators=[SHORT]),
    "the epoch began with a short state": lambda c: began(c)["order"].update(torch=SHORT),
    "the epoch began with Python's state of 3 numbers": lambda c: began(c)["order"].update(python=[3, [1, 2, 3], None]),
    "the epoch began with a gauss that is text": lambda c: began(c)["order"]["python"].__setitem__(2, "x"),
    "the epoch began far behind numpy's numbers": lambda c: began(c)["order"]["numpy"]["state"].update(pos=100_000),
    "the epoch began with no generators": lambda c: began(c).pop("generators"),
    "the epoch began with a short generator": lambda c: began(c).update(generators=[SHORT]),
    "a short order": lambda c: c["run"]["order"].update(torch=SHORT),
    "numpy's order of 3 numbers": lambda c: c["run"]["order"]["numpy"]["state"].update(key=[1, 2, 3]),
    "numpy's order of another kind": lambda c: c["run"]["order"]["numpy"].update(bit_generator="PCG64"),
    "Python's order of negative numbers": lambda c: c["run"]["order"]["python"].__setitem__(1, [-1] * 625),
    "fed by loader -5": lambda c: c["run"].update(fed=-5),
    "a loss scale of nothing": lambda c: c["run"].update({"loss scale": {"value": 0.0, "good": 0, "skipped": 0}}),
    "a loss scale without counts": lambda c: c["run"].update({"loss scale": {"value": 1.0}}),
}
"""What to make of a real checkpoint.json's content: each is refused, and nothing is changed by it."""
VALUES = [None, "x", -1, 1 << 60, 1.5, True, [], {}, {"$float": "nan"}, FIRST, [[1, 2]], {"a": 1}, "DROP", 10**30]


def systematic(content: Content) -> Iterator[tuple[str, Content]]:
    """Every place of the run's state and of the head, with other values."""
    for path in list(_paths(content)):
        if not path or path[0] in ("files", "tensors") or path[:3] == ("run", "order", "python"):
            continue
        for value in VALUES:
            changed = copy.deepcopy(content)
            holder: Any = changed
            for step in path[:-1]:
                holder = holder[step]
            if value == "DROP":
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            if changed != content and "format" in changed:
                yield f"{path} = {value}", changed


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inside = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value[:3]))
        if isinstance(value, list)
        else []
    )
    for key, one in inside:
        yield from _paths(one, (*at, key))


def written(content: Content) -> bytes:
    """A checkpoint.json with a right hash."""
    return index.text(content)


# Memory.


def measured(act: Callable[[], Any], seconds: int = 60) -> tuple[Any, int]:
    """What `act` returns in a child process (or the name of what it raises), and the bytes by which that has grown."""
    ear, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            torch.set_num_threads(1)  # a pool's threads are not in a child
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                found = act()
            except BaseException as error:
                found = f"{type(error).__name__}: {error}"
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(mouth, json.dumps([found, grown * 1024]).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(mouth)
    with open(ear, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if said else (f"died with code {code}", 0)
