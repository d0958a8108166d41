"""The loader that feeds a loop, met where it is iterated: it was never given, and hands out this rank's rows.

A DataLoader feeds the loop when it is iterated inside it (from `open` to `close`), in the main process, with gradients
on and some model in training mode. A test loader is iterated without gradients or in evaluation mode, and stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, get_worker_info

from distributedtorch.core.errors import UsageError, explain, tell
from distributedtorch.core.world import here
from distributedtorch.data.loader import Loader
from distributedtorch.data.stream import DividedLoader
from distributedtorch.distribute import divide_met


class Feed:
    """What feeds the loop of this process."""

    def __init__(self) -> None:
        self.open = False
        """Whether the loop is under way."""
        self.models: list[nn.Module] = []
        self.named: list[DataLoader[Any]] = []
        """The loaders that were named; where there are any, only these feed the loop."""
        self.divided: dict[int, Loader] = {}
        """By the id of the user's loader."""
        self._making = False
        """Whether a divided loader is making a batch: what it iterates for that is its own."""
        self._noted = False

    def meet(self) -> Callable[[], None]:
        """Divide what feeds the loop from now on. Result: undo."""
        original = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Any:
            return self._epoch(loader) if self._feeds(loader) else original(loader)

        def undo() -> None:
            DataLoader.__iter__ = original  # type: ignore[method-assign]
            self.models, self.named, self.divided = [], [], {}

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        return undo

    def note_none(self) -> None:
        """At a step: say once where no loader was met, so that the ranks repeat each other's work."""
        if here().size > 1 and not self.divided and not self._noted:
            self._noted = True
            if here().rank == 0:
                tell(f"distributedtorch: {_NONE_MET}")

    def _feeds(self, loader: DataLoader[Any]) -> bool:
        if not self.open or self._making or isinstance(loader, DividedLoader) or not here().loop.members:
            return False
        if not torch.is_grad_enabled() or get_worker_info() is not None:
            return False
        named = not self.named or any(loader is known for known in self.named)
        return named and any(model.training for model in self.models)

    def _epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        refuse_own_way(loader)
        if id(loader) not in self.divided:
            self.divided[id(loader)] = divide_met(loader)
        with self._make():
            epoch = iter(self.divided[id(loader)])
        return self._batches(epoch)

    def _batches(self, epoch: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            with self._make():
                batch = next(epoch, end)
            if batch is end:
                return
            yield batch

    @contextmanager
    def _make(self) -> Iterator[None]:
        self._making = True
        try:
            yield
        finally:
            self._making = False


def refuse_own_way(loader: Any) -> None:
    """Refuse a loader whose iteration cannot be stood around."""
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        return
    raise UsageError(
        explain(
            f"the loop is fed by a {type(loader).__name__}, which iterates in its own way",
            "a plain torch DataLoader: it is divided where it is iterated, and the loop goes on with your object",
            "use model, optimizer, loader = dt.distribute(model, optimizer, loader), and iterate what comes back",
        )
    )


_NONE_MET = (
    "no DataLoader was iterated in training mode between launch() and barrier(), so every rank trains on whole "
    "batches: iterate the loader there, or use dt.distribute(model, optimizer, loader)"
)
