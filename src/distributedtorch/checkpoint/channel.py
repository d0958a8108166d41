"""How the ranks of one save speak: a few short keys in the store, and a beat that tells a slow rank from a silent one.

A rank marks that it has begun (its training thread, through a connection that is there already), then its writing
thread connects and beats every few seconds, however long its disk takes. A rank that has begun and does not beat is
given up by those who wait for it; one that has not begun is late, which is the watch's affair.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core.errors import CheckpointError, explain

_SECONDS_TO_COME = 3600.0
_SECONDS_OF_SILENCE = 30.0
_SECONDS_BETWEEN_BEATS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1


def begins(store: Callable[[], Store], name: str, rank: int) -> None:
    """This rank has begun the save `name`; where the store cannot be told, its writing thread will fail by itself."""
    with contextlib.suppress(Exception):
        store().set(f"{name}/began/{rank}", "")


class Channel:
    """This rank alone, or through the store, until it is closed."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Callable[[], Store] | None, name: str) -> None:
        self.rank, self.ranks, self.name = rank, list(ranks), name
        self.leader = self.ranks[0]
        self._store = None if store is None else store()
        self._said: dict[str, str] = {}
        self._over = threading.Event()
        self._beats: threading.Thread | None = None
        if self._store is not None:
            self._beats = threading.Thread(target=self._beat, args=(self._store,), daemon=True)
            self._beats.start()

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def say(self, key: str, value: Any) -> None:
        if self._store is None:
            self._said[key] = json.dumps(value)
        else:
            self._store.set(f"{self.name}/{key}", json.dumps(value))

    def hear(self, key: str, rank: int) -> Any:
        """What `rank` says.

        Raises:
            CheckpointError: It has begun, and gives no sign of life; or it does not begin.
        """
        if self._store is None:
            return json.loads(self._said[key])
        place, pause, looked = f"{self.name}/{key}", 0.001, time.monotonic()
        seen, since = (False, 0), looked
        while not self._store.check([place]):
            time.sleep(pause)
            pause, now = min(1.5 * pause, _SECONDS_BETWEEN_LOOKS), time.monotonic()
            if now - looked > _SECONDS_BETWEEN_BEATS:
                sign, looked = self._signs(self._store, rank), now
                seen, since = (seen, since) if sign == seen else (sign, now)
                if now - since > (_SECONDS_OF_SILENCE if seen[0] else _SECONDS_TO_COME):
                    raise CheckpointError(_silent(rank, now - since))
        return json.loads(self._store.get(place))

    def forget(self, keys: Sequence[str]) -> None:
        if self._store is not None:
            for key in keys:
                self._store.delete_key(f"{self.name}/{key}")

    def close(self) -> None:
        """No more is said or heard."""
        self._over.set()
        if self._beats is not None:
            self._beats.join()

    def _signs(self, store: Store, rank: int) -> tuple[bool, int]:
        """Whether a rank has begun, and how often it has beaten."""
        return store.check([f"{self.name}/began/{rank}"]), store.add(f"{self.name}/beats/{rank}", 0)

    def _beat(self, store: Store) -> None:
        """Beside the thread that writes: a store's own lock lets both use it, as neither waits inside it."""
        with contextlib.suppress(RuntimeError):  # out of reach: the others hear that nothing is heard
            while not self._over.wait(_SECONDS_BETWEEN_BEATS):
                store.add(f"{self.name}/beats/{self.rank}", 1)


def _silent(rank: int, seconds: float) -> str:
    given = f"nothing was heard of rank {rank} for {seconds:.0f} s while a checkpoint was being written"
    do = f"look at the output of rank {rank}: it cannot reach the store; earlier checkpoints are as they were"
    return explain(given, "every rank to write its part", do)
