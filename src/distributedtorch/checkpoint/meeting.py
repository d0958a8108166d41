"""When a save is carried out: at once where all ranks ask for it, else when all of them can.

Ranks that ask for the same thing after the same step meet in the store. The last to arrive decides "now"; a rank that
has waited in vain (rank 0 for 1 s, the others for 10) decides "later", and its call returns: whoever decides first
decides for all (one atomic compare-and-set). What is put off travels as one number in the control message of the next
backward, so that all ranks carry it out after the same optimizer step, at no cost of its own. At exit the ranks meet
once more: a rank that ends early waits 2 s for the others and takes part in what they still ask for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.core.step import Loop
from distributedtorch.launch import record
from distributedtorch.launch.join import client

_SECONDS_TO_MEET, _SECONDS_FOR_RANK_0 = 1.0, 10.0
"""Rank 0 is often alone in asking, and often late when it is not."""
_SECONDS_TO_LEAVE = 2.0
_SECONDS_TO_KEEP_A_PROMISE = 60.0
_SECONDS_BETWEEN_LOOKS = 0.01
_ASKED, _PUT_OFF, _EXIT = "save/asked", "save/put off", "save/exit"


class Meeting:
    """The saves that this rank asks for, or is asked for by others."""

    def __init__(self, loop: Loop, carry_out: Callable[[str], None]) -> None:
        self.loop, self.rank, self.world = loop, loop.comm.rank, loop.comm.world
        self.carry_out = carry_out
        """Does what a request says: a group call."""
        self.times: Counter[str] = Counter()
        """How often this rank has asked for the same thing after the same step."""
        self.heard: set[str] = set()
        self.done = 0
        """Requests put off and carried out since, counted once for every rank that asked."""
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """A connection of its own, made when first needed."""
        if self._store is None:
            self._store = client(10)
        return self._store

    def ask(self, request: str) -> bool:
        """Carry `request` out with all ranks now, or put it off. Result: whether it was carried out.

        Raises:
            CheckpointError: It could not be carried out, or cannot be any more because other ranks have ended.
        """
        place = f"save/{self.loop.steps}/{request}"
        self.times[place] += 1
        decided = self._arrive(f"{place}/{self.times[place]}", request)
        if decided == "now":
            self.carry_out(request)
            return True
        if self.store.check([_EXIT]):
            raise CheckpointError(_ended(request))
        self.loop.requests.append(request)
        self.put_off()
        if decided == self._mine():
            when = "all ranks carry it out after their next optimizer step, with that moment's state"
            record.say(f"dt.save was called on rank {self.rank}, and the others have not come to it: {when}")
        return False

    def put_off(self) -> None:
        """This rank has asked for something that is to be carried out later."""
        self.store.add(_PUT_OFF, 1)

    def at_exit(self) -> None:
        """Carry out what is left if all ranks come to their end; a failure is reported as one of the script."""
        if record.failed():
            return
        try:
            if self._leave() == "together" and self.store.add(_PUT_OFF, 0) > self.done:
                self.catch_up()
            elif self.loop.requests:
                raise CheckpointError(_ended(self.loop.requests[0]))
        except Exception as error:
            if self.loop.requests or isinstance(error, CheckpointError):
                sys.excepthook(type(error), error, error.__traceback__)

    def _mine(self) -> str:
        return f"later, says rank {self.rank}"

    def _arrive(self, key: str, request: str) -> str:
        """Be there, and return what is decided."""
        for act in self.loop.comm.before_waiting:
            act()
        store, decision = self.store, f"{key}/decision"
        if key not in self.heard:
            self.heard.add(key)
            store.set(f"{_ASKED}/{store.add(_ASKED, 1)}", json.dumps([key, request]))
        if store.add(key, 1) == self.world:
            return store.compare_set(decision, "", "now").decode()
        deadline = time.monotonic() + (_SECONDS_TO_MEET if self.rank == 0 else _SECONDS_FOR_RANK_0)
        while not store.check([decision]):
            if time.monotonic() > deadline:
                return store.compare_set(decision, "", self._mine()).decode()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return store.get(decision).decode()

    def catch_up(self) -> None:
        """All ranks, at the same moment: carry out what any of them has put off."""
        mine, self.loop.requests, self.loop.requested = self.loop.requests, [], 0
        lists = self.loop.comm.bytes_of_all("saves put off", json.dumps(mine).encode())
        asked = [request for text in lists for request in json.loads(text)]
        self.done += len(asked)
        for request in dict.fromkeys(asked):
            self.carry_out(request)

    def _leave(self) -> str:
        """Wait for the others at exit, and take part in what they ask for meanwhile."""
        store = self.store
        if store.add(f"{_EXIT}/count", 1) == self.world:
            store.compare_set(_EXIT, "", "together")
        began, looked = time.monotonic(), 0
        while not store.check([_EXIT]):
            limit = _SECONDS_TO_KEEP_A_PROMISE if self.loop.requests else _SECONDS_TO_LEAVE
            if store.check([f"{_ASKED}/{looked + 1}"]):
                looked += 1
                self._join_in(*json.loads(store.get(f"{_ASKED}/{looked}")))
                began = time.monotonic()
            elif time.monotonic() - began > limit:
                store.compare_set(_EXIT, "", "apart")
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        return store.get(_EXIT).decode()

    def _join_in(self, key: str, request: str) -> None:
        """Take part in a save another rank waits with; if it fails, that is raised there, in the script."""
        if key in self.heard or self.store.check([f"{key}/decision"]):
            return
        self.heard.add(key)
        if self._arrive(key, request) == "now":
            with contextlib.suppress(CheckpointError):
                self.carry_out(request)


def _ended(request: str) -> str:
    return explain(
        f"dt.save was called on some ranks only ({request}), and the others have ended",
        "all ranks: each holds a part of the optimizer's state",
        "call dt.save on all ranks",
    )


_meeting: list[Meeting] = []


def of(loop: Loop, carry_out: Callable[[str], None]) -> Meeting:
    """The meeting of this process's ranks; from the first call on, they also meet at exit."""
    if not _meeting or _meeting[0].loop is not loop:
        _meeting[:] = [Meeting(loop, carry_out)]
        atexit.register(_meeting[0].at_exit)
    return _meeting[0]
