"""Across hosts: a store that others can reach, used so that only who knows the job's secret can say anything in it.

The user gives every process the same `DISTRIBUTEDTORCH_SECRET`. Keys are then names that only it leads to, and every
value carries a code of its key and itself (HMAC-SHA256): what anyone else writes is refused when it is read. Counters
carry none: who is in that network can still stop a job, and see what it says, but not speak for it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from distributedtorch.core.errors import LaunchError, explain

VARIABLE = "DISTRIBUTEDTORCH_SECRET"
_SHORTEST = 16
_CODE_BYTES = 64


def given() -> bytes | None:
    """The job's secret, if there is one.

    Raises:
        LaunchError: It could be guessed.
    """
    text = os.environ.get(VARIABLE, "")
    if text and len(text) < _SHORTEST:
        needed = f"at least {_SHORTEST} characters that nobody can guess"
        do = f"export {VARIABLE}=$(openssl rand -hex 16), the same for every process"
        raise LaunchError(explain(f"{VARIABLE} of {len(text)} characters", needed, do))
    return text.encode() or None


def spoken() -> str:
    """How the store is kept from strangers, in a line about where it listens."""
    return f"({VARIABLE} guards what is said there)" if given() else f"without a key (set {VARIABLE} in every process)"


def code(secret: bytes, *parts: bytes) -> str:
    """What only who knows the secret can make of these parts."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(secret, framed, hashlib.sha256).hexdigest()


class Keyed:
    """A store as torch has them, on top of one that others can reach."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self.store, self.secret = store, secret

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        self.store.set(self._name(key), self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self.store.get(self._name(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self.store.multi_get([self._name(key) for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, found, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check([self._name(key) for key in keys])

    def wait(self, keys: Sequence[str]) -> None:
        self.store.wait([self._name(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self.store.add(self._name(key), value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        was = self._sealed(key, expected) if expected else ""
        return self._opened(key, self.store.compare_set(self._name(key), was, self._sealed(key, desired)))

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(self._name(key))

    def _name(self, key: str) -> str:
        return code(self.secret, b"name", key.encode())

    def _sealed(self, key: str, value: str) -> str:
        return code(self.secret, b"value", key.encode(), value.encode()) + value

    def _opened(self, key: str, found: bytes) -> bytes:
        mark, value = found[:_CODE_BYTES], found[_CODE_BYTES:]
        if not hmac.compare_digest(mark, code(self.secret, b"value", key.encode(), value).encode()):
            told = f"the value of {key!r} in the store is not of this job: someone else has written it"
            do = "keep strangers out of that network, and start again"
            raise LaunchError(explain(told, f"values of processes that know {VARIABLE}", do))
        return value
