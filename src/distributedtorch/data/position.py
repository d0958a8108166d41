"""Where the order of one loader stands, so that a run that goes on later hands out the batches that were left.

The order of an epoch follows from the random state at its beginning. That state is kept; to go on at batch b the epoch
is begun from it once more, and b batches are passed over. After that the random state is the one that was saved: what
else has drawn since the epoch began counts too. Generators that the user gave to the loader or its samplers are kept in
the same way.
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from distributedtorch.data.cursor import Cursor
from distributedtorch.data.stream import State, Stream, as_plain, capture, from_plain, install

Walk = TypeVar("Walk")


class Position:
    """The random states that one loader's order comes from: at the beginning of its epoch, and now."""

    def __init__(self, loader: Any, stream: Stream | None, cursor: Cursor) -> None:
        self.loader, self.stream, self.cursor = loader, stream, cursor
        self._began: tuple[State, list[torch.Tensor]] | None = None
        self._walk: Callable[[], Any] = lambda: None
        self._goes_on = False
        self._later = False
        """Whether the next epoch is not the run's first, though it is this object's."""
        self._walked_whole = False
        self.met = False
        """Whether the loader was not given."""

    def begin(self, begin: Callable[[int], Walk]) -> tuple[Walk, int]:
        """Start an epoch, or the rest of one; its batches and its number."""
        self._let_workers_be_known(begin)
        if not self._goes_on or self._began is None:
            self._goes_on = False
            self._began = self._now(), self._generators_now()
            return begin(0), self.cursor.begin()
        self._goes_on = False
        now, theirs = self._now(), self._generators_now()
        self._set(*self._began)
        try:
            return begin(self.cursor.batch), self.cursor.epoch
        finally:
            self._set(now, theirs)

    def begin_whole(self, begin: Callable[[int], Walk]) -> Walk:
        """Start a walk that does not count, as of an evaluation, from the first batch on."""
        self._let_workers_be_known(begin)
        self._walked_whole = True
        return begin(0)

    def _let_workers_be_known(self, begin: Callable[[int], Walk]) -> None:
        """Torch draws the seed of workers that stay in the first epoch only: let that be over."""
        if self._later and getattr(self.loader, "persistent_workers", False):
            before = self._now(), self._generators_now()
            begin(0)
            self._set(*before)
        self._later = False

    @property
    def pending(self) -> int:
        """How many batches of the epoch that is begun next are done already."""
        return self.cursor.batch if self._goes_on else 0

    @property
    def live(self) -> bool:
        """Whether somebody walks: an epoch is held, and not at its end."""
        return self._walk() is not None and not self.cursor.ended

    def fork(self, loader: Any) -> Position:
        """A position of its own that stands at the same place, but at the beginning of an epoch."""
        made = Position(loader, self.stream, replace(self.cursor))
        made._later = self._later
        return made

    def take_over(self, other: Position) -> None:
        """Stand where a position of the same loader stands that has begun an epoch."""
        self._began, self._goes_on, self._later = other._began, False, False
        self._walked_whole = self._walked_whole or other._walked_whole
        self.cursor.load_state_dict(other.cursor.state_dict())

    def walk(self, epoch: Any, let_go: Callable[[], None]) -> Any:
        """An epoch that is handed to the user; `let_go` is called when nobody holds it any more."""
        self._walk = weakref.ref(epoch, lambda _: let_go())
        return epoch

    def left(self, epoch: Any) -> None:
        """An epoch has come to its end."""
        if self._walk() is epoch:
            self.cursor.ended = True

    def state_dict(self) -> dict[str, Any]:
        """Plain data: counts, and where the epoch goes on, the states it began with."""
        if self._walk() is None and not self._goes_on:
            self.cursor.ended = True  # left by `break`: nobody holds it any more
        saved: dict[str, Any] = {"cursor": self.cursor.state_dict(), "generators": _plain(self._generators_now())}
        saved |= {"walked whole": self._walked_whole, "met": self.met}
        if not self.cursor.ended and self._began is not None:
            saved["began"] = {"order": as_plain(self._began[0]), "generators": _plain(self._began[1])}
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Stand where another loader stood; a walk that is under way cannot go on."""
        walk = self._walk()
        if walk is not None:
            walk.stale = True
        self.cursor.load_state_dict(saved["cursor"])
        for generator, state in zip(self._generators(), saved["generators"], strict=False):
            generator.set_state(_tensor(state))
        self._walked_whole = bool(saved.get("walked whole"))
        self._later = self._walked_whole or self.cursor.epoch + self.cursor.ended > 0
        began = saved.get("began")
        self._goes_on = began is not None
        if began is not None:
            self._began = from_plain(began["order"]), [_tensor(text) for text in began["generators"]]

    def _now(self) -> State:
        return capture(full=True) if self.stream is None else self.stream.state

    def _set(self, state: State, generators: list[torch.Tensor]) -> None:
        if self.stream is None:
            install(state, full=True)
        else:
            self.stream.state = state
        for generator, value in zip(self._generators(), generators, strict=False):
            generator.set_state(value)

    def _generators_now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Those that the user gave, each once."""
        holders = [self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)]
        holders.append(getattr(holders[-1], "sampler", None))
        found = {id(g): g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)}
        return list(found.values())


def _plain(states: list[torch.Tensor]) -> list[str]:
    return [base64.b64encode(bytes(state.tolist())).decode() for state in states]


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8, device="cpu")
