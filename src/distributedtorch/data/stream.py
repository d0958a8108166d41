"""The random state that the order of data comes from, kept apart from each rank's own.

One process draws shuffles, dropout and augmentation from one global state. Ranks need the same shuffles but different
dropout, so the order gets a state of its own: copied from the global one at the start, hence the same order as one
process as long as nothing else draws between batches. Each rank holds one copy (about 10 kB); rank 0's travels once,
at the start, as JSON. It covers torch's CPU generator, Python's `random` and numpy's global state; a sampler that
draws from a device generator, or from a generator object that differs between ranks, is outside it.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader


class State(NamedTuple):
    """Global random states at one moment; `None` for what is not covered."""

    torch: torch.Tensor
    python: tuple[Any, ...] | None
    numpy: dict[str, Any] | None


class Stream:
    """One random state for the order of all data, advanced only inside `drawing`."""

    def __init__(self) -> None:
        """Copy the global states as they are now; the global states are left untouched."""
        self._state = capture(full=True)
        self._active = False

    def drawing(self, full: bool) -> Drawing:
        """A `with` block in which the global states are this stream's; this rank's own are put back after it.

        Args:
            full: All three states, for samplers that are the user's code; otherwise torch's only. Inside another
                `drawing` of the same stream it does nothing.
        """
        return Drawing(self, full)

    def hand_back(self) -> None:
        """Make this stream's state the global one: what draws next goes on where the order of data stands."""
        install(self._state, full=True)

    @property
    def state(self) -> State:
        """The state now; it is replaced, never changed."""
        return self._state

    @state.setter
    def state(self, value: State) -> None:
        self._state = value

    def state_bytes(self) -> bytes:
        """The state as JSON, to send to other ranks."""
        return json.dumps(as_plain(self._state)).encode()

    def load_bytes(self, data: bytes) -> None:
        """Take over a state made by `state_bytes`."""
        self._state = from_plain(json.loads(data))


def as_plain(state: State) -> dict[str, Any]:
    """A state as plain data."""
    numpy_state = state.numpy
    if numpy_state is not None:
        inner = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
        numpy_state = {**numpy_state, "state": inner}
    return {
        "torch": base64.b64encode(bytes(state.torch.tolist())).decode(),
        "python": state.python,
        "numpy": numpy_state,
    }


def from_plain(given: Mapping[str, Any]) -> State:
    """The state that `as_plain` was given."""
    torch_state = torch.tensor(list(base64.b64decode(given["torch"])), dtype=torch.uint8, device="cpu")
    python = given["python"]
    if python is not None:
        version, internal, gauss = python
        python = (version, tuple(internal), gauss)
    return State(torch_state, python, _numpy_from_json(given["numpy"]))


class Drawing:
    """The swap behind `Stream.drawing`: a plain class, because it runs once per batch."""

    def __init__(self, stream: Stream, full: bool) -> None:
        self._stream = stream
        self._full = full
        self._own: State | None = None

    def __enter__(self) -> None:
        if self._stream._active:
            return
        self._stream._active = True
        self._own = capture(self._full)
        install(self._stream._state, self._full)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is None:
            return
        drawn = capture(self._full)
        self._stream._state = drawn if self._full else self._stream._state._replace(torch=drawn.torch)
        install(self._own, self._full)
        self._own = None
        self._stream._active = False


def drawing(stream: Stream | None, full: bool) -> AbstractContextManager[None]:
    """`stream.drawing(full)`; without a stream, draws come from the global states as they are."""
    return nullcontext() if stream is None else stream.drawing(full)


class DividedLoader(DataLoader[Any]):
    """A loader the library made: it draws where it should by itself."""


def serve(loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any], stream: Stream | None) -> Any:
    """A walk over a torch DataLoader that draws its order from `stream`, though it is not divided (a test set).

    In one process all draw from one state, so an evaluation between two epochs moves the order of the second.
    """
    if stream is None:
        return original(loader)
    with stream.drawing(full=False):
        iterator: Any = original(loader)
    if hasattr(iterator, "_sampler_iter"):
        iterator._sampler_iter = _drawn(iterator._sampler_iter, stream)
    return iterator


def _drawn(indices: Iterator[Any], stream: Stream) -> Iterator[Any]:
    end = object()
    while True:
        with stream.drawing(full=False):
            index = next(indices, end)
        if index is end:
            return
        yield index


def capture(full: bool) -> State:
    """Copy the global states."""
    torch_state = torch.default_generator.get_state()
    if not full:
        return State(torch_state, None, None)
    numpy = _numpy_random()
    # Only MT19937, numpy's default, has the state layout that is sent as JSON.
    numpy_state = None if numpy is None else numpy.get_state(legacy=False)
    if numpy_state is not None and numpy_state["bit_generator"] != "MT19937":
        numpy_state = None
    return State(torch_state, random.getstate(), numpy_state)


def install(state: State, full: bool) -> None:
    """Make `state` the global states."""
    torch.default_generator.set_state(state.torch)
    if not full:
        return
    if state.python is not None:
        random.setstate(state.python)
    numpy = _numpy_random()
    if state.numpy is not None and numpy is not None:
        numpy.set_state(state.numpy)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _numpy_from_json(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or "numpy" not in sys.modules:
        return None
    import numpy

    key = numpy.array(given["state"]["key"], dtype=numpy.uint32)
    return {**given, "state": {**given["state"], "key": key}}
