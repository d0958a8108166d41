"""What feeds the loop: loaders that were given, and those that are met where they are iterated.

A loader that was given hands out this rank's rows; without gradients, or with all models in eval mode, whole batches.
A plain DataLoader that was not given, or the object that a given one was, is on trial for its first batch: that stays
whole on every rank, which is exact, and if a backward is about it and nothing else, the rest of the epoch is divided.
A loader that is walked for something else (statistics, a sloppy evaluation) stays whole. Under `DistributedPyTorch`
the loop says when it is open, and a loader that is iterated in it is divided at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

from distributedtorch import inspect, report
from distributedtorch.contents import batches_of
from distributedtorch.core.batches import Offer, Rows
from distributedtorch.core.errors import UsageError, explain
from distributedtorch.core.step import Member
from distributedtorch.core.world import here
from distributedtorch.data import survey
from distributedtorch.data.cursor import Cursor, Share
from distributedtorch.data.loader import STALE, Epoch, Loader, Making, Pass, iterates_its_own_way
from distributedtorch.data.stream import DividedLoader, serve
from distributedtorch.run import RUN

_STEPS_TO_TELL = 2
Divide = Callable[[Any], Loader]


class Feed:
    """What feeds the loop of this process."""

    def __init__(self, divide: Divide) -> None:
        self._divide = divide
        self.making = Making()
        self.own = False
        """Whether each rank draws batches of its own: nothing is divided."""
        self.open: bool | None = None
        """Whether the loop is under way, where it says so."""
        self.named: list[DataLoader[Any]] = []
        """The loaders that were named to `DistributedPyTorch`; where there are any, only these feed its loop."""
        self._workers_stay: dict[int, Loader] = {}
        """Of loaders that were not given, by the id of the user's."""
        self._compared: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        """Those that all ranks have found to be the same everywhere."""
        self._said: set[str] = set()
        self._steps = 0
        self._sees = False

    def meet(self) -> list[Callable[[], None]]:
        """See every DataLoader that is iterated from now on. Result: undo, the first time."""
        if self._sees:
            return []
        self._sees = True
        original = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Any:
            if isinstance(loader, DividedLoader):
                return original(loader)
            walk = self._met(loader)
            return serve(loader, original, None if self.own else RUN.stream) if walk is None else walk

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        return [lambda: setattr(DataLoader, "__iter__", original)]

    def choose(self, loader: Loader) -> Iterator[Any]:
        """What a walk over a loader that was given is: this rank's rows, or whole batches."""
        if self.making.depth:
            return loader.epoch()
        if not torch.is_grad_enabled():
            self._say("whole", f"batch {loader.batch_global or '?'} {_WHOLE}")
            return loader.whole(lambda share, batch: self._evaluated(loader, share, batch))
        return loader.epoch() if _training() else Trial(self, loader, loader, met=False)

    def stepped(self, _: Sequence[Member]) -> None:
        """An optimizer has stepped: say once where the ranks repeat each other's work."""
        self._steps += 1
        loop = here().loop
        if self._steps != _STEPS_TO_TELL or loop.batches.present is not None or not loop.in_lockstep:
            return
        if not self.own:
            same = "the same " if loop.alike else ""
            self._say("repeated", _REPEATED.format(same=same, world=here().size))
        elif loop.alike:
            self._say("alike", f"batches='own', and every rank draws the same: {here().size} times the work of one")

    def added(self, values: Tensor) -> None:
        """`dt.total` has added the ranks' values: say once where each is of all rows, as after an evaluation."""
        if here().loop.batches.evaluated and bool((values == values[0]).all()) and bool(values[0].any()):
            self._say("added", _ADDED.format(world=here().size))

    def feeds(self, loader: Loader, source: Loader) -> None:
        """A loader that was not given, or is walked as it was before, feeds the loop. A group call the first time."""
        if all(loader is not one for one in RUN.loaders):
            claim = _claim(loader)
            RUN.unclaimed = [position for position in RUN.unclaimed if position is not claim]
            loader.place.met = True
            RUN.loaders.append(loader)
        if source.user in self._compared:
            return
        self._compared.add(source.user)
        assert RUN.plan is not None
        if here().size > 1:
            inspect.same_everywhere(inspect.Given(), [source], RUN.plan, here().comm)
            if RUN.balance is not None:
                RUN.balance.meet()
            self._say(f"met {source.note}", report.met(source, trial=self.open is None))

    def _say(self, key: str, text: str) -> None:
        if key not in self._said and here().size > 1:
            self._said.add(key)
            report.say(here(), text)

    def _evaluated(self, loader: Loader, share: Share, batch: Any) -> None:
        loop = here().loop
        if loop.members:
            loop.batches.arrived(rows_of(share, loader, loader.cursor), batch)

    def _met(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """A walk over a user's DataLoader that may feed the loop; None: it does not."""
        if self.making.depth or self.own or get_worker_info() is not None or not here().loop.members:
            return None
        if not torch.is_grad_enabled() or threading.current_thread() is not threading.main_thread():
            return None
        if self.open is None:
            return self._tried(loader) if _divisible(loader) else None
        if not self.open or not _training() or not self._named(loader):
            return None
        refuse_own_way(loader)
        found, source = self._found(loader)
        self.feeds(found, source)
        return found.epoch(source)

    def _named(self, loader: DataLoader[Any]) -> bool:
        return not self.named or any(loader is known for known in self.named)

    def _tried(self, loader: DataLoader[Any]) -> Iterator[Any]:
        found, source = self._found(loader)
        if not found.place.pending:
            return Trial(self, found, source, met=True)
        self.feeds(found, source)
        return found.epoch(source)

    def _found(self, user: DataLoader[Any]) -> tuple[Loader, Loader]:
        """The loader that keeps the position of the user's, and the one that makes its batches.

        They differ where a loader is made anew for every epoch: it goes on where the one before has ended.
        """
        for known in RUN.loaders:
            if known.user is user:
                return known, known
        source = self._workers_stay.get(id(user)) or self._divide(user)
        if user.persistent_workers:
            self._workers_stay[id(user)] = source
        for known in RUN.loaders if RUN.balance is None else ():
            same = getattr(known, "dataset", None) is user.dataset and batches_of(known) == batches_of(source)
            if same and not known.place.live:
                return known, source
        position = _claim(source)
        if position is not None and source.cursor.epoch < 0:
            source.place.load_state_dict(position)
        return source, source


class Trial:
    """A walk whose batches are whole on every rank until it is seen to feed the loop, and divided from then on."""

    def __init__(self, feed: Feed, loader: Loader, source: Loader, *, met: bool) -> None:
        self._feed, self._loader, self._source, self._met = feed, loader, source, met
        self._stood = loader.cursor.state_dict()
        self._position = loader.place.fork(source.user)
        self._evaluates = not _training()
        """Whether no model is in training mode: then only a step tells that it is trained all the same."""
        self._loop = here().loop
        self._began = self._loop.steps
        self._offer: Offer | None = None
        self._epoch: Epoch | None = None
        self._else = False
        """Whether it was walked for something else."""
        with loader.making:
            pieces, _ = self._position.begin(source.begin_whole)
        self._whole = Pass(source, pieces, self._position.cursor, self._handed)

    def __iter__(self) -> Trial:
        return self

    def __next__(self) -> Any:
        if self._epoch is None and self._feeds():
            self._divide()
        if self._epoch is not None:
            return next(self._epoch)
        return next(self._whole)

    def __len__(self) -> int:
        return len(self._loader)

    def __del__(self) -> None:
        if self._offer is not None:
            self._loop.batches.withdraw(self._offer)

    def _handed(self, share: Share, batch: Any) -> None:
        """A whole batch goes out. Beside another loader's it is not sure what a backward is about."""
        loop = self._loop
        self._else = self._else or any(known.place.live for known in RUN.loaders)
        if loop.members and not self._else:
            self._offer = loop.batches.offered(rows_of(share, self._loader, self._position.cursor))

    def _feeds(self) -> bool:
        """Whether what went out so far was trained on."""
        if not self._position.cursor.batch:
            return False
        loop, offer, self._offer = self._loop, self._offer, None
        if offer is not None:
            loop.batches.withdraw(offer)
        self._else = self._else or (bool(loop.members) and (offer is None or not offer.taken))
        return not self._else and (not self._evaluates or loop.steps > self._began)

    def _divide(self) -> None:
        if self._loader.cursor.state_dict() != self._stood or self._loader.place.pending:
            raise UsageError(STALE)
        self._loader.place.take_over(self._position)
        if self._met:
            self._feed.feeds(self._loader, self._source)
        self._whole.pieces.divide()
        self._epoch = self._loader.walked(self._whole.pieces, self._loader.cursor.epoch)


def rows_of(share: Share, loader: Loader, cursor: Cursor) -> Rows:
    """What a batch that is handed out says to the step."""
    try:
        last = cursor.batch >= len(loader)
    except TypeError:
        last = False
    return Rows(
        mine=share.rows,
        everywhere=share.rows_global,
        batch=share.batch,
        within=cursor.batch,
        last=last,
        source=id(loader),
        copies=share.copies,
        proof=share.proof,
    )


def see(_: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook on models that each rank gives batches of its own: how many rows there are."""
    drawn = here().loop.drawn
    if drawn is not None and not torch.compiler.is_compiling():
        drawn.saw(args, kwargs)


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


def _training() -> bool:
    """Whether some model is in training mode."""
    return not RUN.models or any(model.training for model in RUN.models)


def _divisible(loader: DataLoader[Any]) -> bool:
    """Whether a loader that was not given can be divided like one that was, from any batch on."""
    assert RUN.plan is not None
    if RUN.plan.batch is not None or RUN.plan.balance is not None or iterates_its_own_way(loader):
        return False
    try:
        survey.refuse(loader, here().size)
    except UsageError:
        return False
    return True


def _claim(loader: Loader) -> dict[str, Any] | None:
    """The position that was loaded for a loader like this one: of the one that fed the loop, if it may be that."""
    fed = RUN.fed - len(RUN.loaders)
    order = sorted(range(len(RUN.unclaimed)), key=lambda number: number != fed)
    fit = (RUN.unclaimed[k] for k in order if RUN.unclaimed[k].get("batch", batches_of(loader)) == batches_of(loader))
    return next(fit, None)


_WHOLE = "whole on every rank without gradients or in eval mode (dt.evaluate and dt.accuracy divide it)"
_ADDED = (
    "dt.total has added {world} equal values after a loader was walked whole: each rank has counted every row by itself"
)
_REPEATED = (
    "no loader is divided: every rank computes {same}whole batches, {world} times the work of one process. Give the "
    "loader to dt.distribute and iterate what comes back; batches made by hand are given as "
    "`def batches(): while True: yield get_batch()`"
)
