"""The documents' own face, over the same parts: `DistributedPyTorch` around a loop (`strategy.py` is the other one).

Nothing here exchanges or divides by itself. `setup` is `dt.distribute` put off until there is a world; a second `setup`
releases what is attached and distributes it anew. The loader that feeds the loop is met there (`feed.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from distributedtorch.core.errors import LaunchError, PeerError, UsageError, explain
from distributedtorch.core.override import override
from distributedtorch.core.plan import Plan
from distributedtorch.core.world import accelerator, here
from distributedtorch.distribute import distribute, release
from distributedtorch.feed import refuse_own_way
from distributedtorch.launch import record
from distributedtorch.launch.place import find
from distributedtorch.run import RUN
from distributedtorch.values import barrier, device
from distributedtorch.verify import record as verify_record


@dataclass(eq=False, kw_only=True)
class _Setup:
    """What one call of `setup` was given."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device | str | None
    loader: DataLoader[Any] | None
    scheduler: LRScheduler | None
    plan: Plan | None
    workers: int | None
    undo: Callable[[], None] = lambda: None
    """What ends the waiting for a launch."""

    def shares(self, other: _Setup) -> bool:
        return self.model is other.model or self.optimizer is other.optimizer


class _Face:
    """What was set up in this process."""

    def __init__(self) -> None:
        self.open = False
        """Whether an epoch is under way."""
        self.launched = False
        self.waiting: list[_Setup] = []
        """Set up before there is a world."""
        self.attached: list[_Setup] = []


_FACE = _Face()


class DistributedPyTorch:
    """Distributes a plain loop: `setup` the objects, `launch` an epoch, `barrier` after it, `join` at the end.

    ```python
    dist = DistributedPyTorch(strategy="zero", workers=2)
    dist.setup(model, optimizer, device)
    for epoch in range(num_epochs):
        dist.launch()
        for inputs, labels in train_loader:
            ...
        dist.barrier()
    dist.join()
    ```

    Args:
        strategy: The plan: "ddp", "zero1", "zero2", "zero3" (or "zero"), or more words; ddp where neither this nor the
            command line nor the environment says one.
        workers: How many processes to start where none were started; `launch` can be told too.

    Raises:
        PlanError: The strategy cannot be read.
    """

    def __init__(self, strategy: str | Plan | None = None, workers: int | None = None) -> None:
        self.plan = None if strategy is None else Plan.of(strategy)
        self.workers = workers
        self.epoch = 0
        """How many epochs were launched."""
        self._handled: BaseException | None = None
        """The exception that was being handled when the epoch was launched: not the loop's."""

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device | str | None = None,
        loader: DataLoader[Any] | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        """Say what is to be trained. Before the first `launch` it is remembered; after it, done at once.

        Objects that are set up already are let go first and distributed anew under this plan: parameters and optimizer
        state stay, gradients are dropped. A group call then.

        Args:
            model: The model; moved to `device` where it is not there yet.
            optimizer: Its optimizer.
            device: Where to train; an accelerator without an index is this rank's own.
            loader: The loader that feeds the loop, if it is to be that one only; else it is met in the loop.
            scheduler: Needed only where the plan has `accumulate`.

        Raises:
            UsageError: Something cannot be distributed as given.
        """
        for thing, kind, name in ((model, nn.Module, "model"), (optimizer, Optimizer, "optimizer")):
            if not isinstance(thing, kind):
                said = f"setup() with a {type(thing).__name__} as {name}"
                raise UsageError(explain(said, "setup(model, optimizer, device)", "give them in this order"))
        if loader is not None:
            refuse_own_way(loader)
        for old in [setup for setup in _FACE.waiting if setup.model is model or setup.optimizer is optimizer]:
            _FACE.waiting.remove(old)
            old.undo()
        given = _Setup(
            model=model,
            optimizer=optimizer,
            device=device,
            loader=loader,
            scheduler=scheduler,
            plan=self.plan,
            workers=self.workers,
        )
        _FACE.waiting.append(given)
        if _FACE.launched:
            _attach_waiting()
        else:
            _place(given)
            given.undo = _insist_on_launch(optimizer)

    def launch(self, workers: int | None = None) -> None:
        """Begin an epoch; the first call of all starts the processes, or joins those that were started.

        Args:
            workers: How many processes to start where none were started.

        Raises:
            UsageError: Nothing is set up.
            LaunchError: The processes cannot be started.
        """
        if not _FACE.waiting and not _FACE.attached:
            given, do = "launch() before setup()", "call setup(model, optimizer, device) first"
            raise UsageError(explain(given, "something to train", do))
        for setup in _FACE.waiting:
            setup.workers = workers or setup.workers or self.workers
        _attach_waiting()
        _FACE.launched = True
        _open(True)
        self._handled = sys.exception()
        self.epoch += 1

    def barrier(self) -> None:
        """End an epoch: return when every rank has come here."""
        _open(False)
        barrier()

    def join(self) -> None:
        """Wait until every rank has come here, however late. Everything stays distributed.

        Raises:
            PeerError: Another rank ended before; it says with which exception, where that is known.
            BaseException: The one that is on its way through this rank, if there is one: nobody is waited for then.
        """
        _open(False)
        error = sys.exception()
        if error is not None and error is not self._handled:
            raise error
        try:
            barrier()
        except PeerError as lost:
            raise PeerError(_first_exception() or str(lost)) from lost


def _open(whether: bool) -> None:
    """An epoch begins or ends: loaders that are iterated in it are divided."""
    _FACE.open = whether
    if RUN.feed is not None:
        RUN.feed.open = whether


def _attach_waiting() -> None:
    """Distribute what waits; what is attached with the same objects is let go first, and so all else for a moment."""
    new, _FACE.waiting = _FACE.waiting, []
    _refuse_more_workers(new)
    kept = [setup for setup in _FACE.attached if not any(setup.shares(other) for other in new)]
    if len(kept) < len(_FACE.attached):
        _refuse_mixed()
        new = kept + new
        release()
        for setup in new:
            setup.model.zero_grad(set_to_none=True)
    for setup in new:
        setup.undo()
        setup.undo = lambda: None
        _attach(setup)


def _attach(setup: _Setup) -> None:
    _place(setup)
    extra = [thing for thing in (setup.scheduler, setup.loader) if thing is not None]
    distribute(setup.model, setup.optimizer, *extra, plan=setup.plan, workers=setup.workers)
    if not _FACE.attached:
        RUN.restore.append(_FACE.attached.clear)
    _FACE.attached.append(setup)
    _open(_FACE.open)
    if setup.loader is not None and RUN.feed is not None:
        RUN.feed.named.append(setup.loader)
    here().undo.append(_insist_on_gradients(setup.optimizer))


def _insist_on_launch(optimizer: Optimizer) -> Callable[[], None]:
    """A step before the first launch would be this process's own: refuse it. Result: undo."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        raise UsageError(_NO_LAUNCH)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return override(optimizer, "step", step)


def _insist_on_gradients(optimizer: Optimizer) -> Callable[[], None]:
    """A step without any gradient is most likely a forgotten backward: refuse it. Result: undo."""
    original = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            return original(closure)
        came = any(member.touched_since_step for member in here().loop.members if member.sync.optimizer is self)
        if not came and all(param.grad is None for group in self.param_groups for param in group["params"]):
            raise UsageError(_NO_BACKWARD)
        return original()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return override(optimizer, "step", step)


def _place(setup: _Setup) -> None:
    """Move the model, and the state its optimizer has already, where they are to be."""
    if setup.device is None:
        return
    there = torch.device(setup.device)
    if there.index is None and there.type == accelerator():
        there = device()
    if any(tensor.device != there for tensor in (*setup.model.parameters(), *setup.model.buffers())):
        setup.model.to(there)
        if setup.optimizer.state:
            setup.optimizer.load_state_dict(setup.optimizer.state_dict())


def _first_exception() -> str:
    """What the first rank to fail said, where ranks leave records."""
    folder = find().run_folder
    if folder is None:
        return ""
    ends = [record.read(folder, rank) for rank in range(here().size + here().servers)]
    raised = [end for end in ends if end is not None and end.kind == "raised" and not end.consequence]
    if not raised:
        return ""
    first = min(raised, key=lambda end: end.time)
    return f"{record.name_of(folder, first.rank)} raised {first.type}: {first.message} (at {first.where})"


def _refuse_more_workers(setups: Sequence[_Setup]) -> None:
    """Processes are started once, by the first launch."""
    for setup in setups if _FACE.launched and find().launcher == "none" else ():
        if verify_record.workers_here(setup.workers) not in (None, here().size):
            given = f"workers={setup.workers} in a later setup, but the first launch ran as {here().size} process"
            raise LaunchError(explain(given, "the number in the first", f"put workers={setup.workers} there"))


def _refuse_mixed() -> None:
    mine = {id(setup.model) for setup in _FACE.attached}
    if any(id(model) not in mine for model in RUN.models):
        given = "a second setup() while other models were given to dt.distribute"
        raise UsageError(explain(given, "one way to distribute", "set all of them up with DistributedPyTorch"))


_NO_LAUNCH = explain(
    "optimizer.step() after setup() and before launch()",
    "a launch: it starts or joins the processes that train together",
    "call launch() at the beginning of every epoch",
)
_NO_BACKWARD = explain(
    "optimizer.step() with no gradient on any parameter since the last step",
    "a backward pass before every step",
    "compute the loss and call loss.backward() before optimizer.step()",
)
