"""What a server has applied, kept where its next start finds it: the state at some version, and every push since.

A push is in the file before it is applied, and applied before anybody is answered; so what was answered is there after
the process was killed at any moment, and what is there twice is known by its worker and step. Nothing is flushed to the
disk: it outlives the process, not the machine; checkpoints do that.

Holds on disk parameters Psi and optimizer state K Psi, and pushes of Psi until they are as much again.
Written per push: Psi, to memory of the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributedtorch.serve.board import Push

_ROUND, _PUSH, _MAGIC, _END = struct.Struct("<4sII"), struct.Struct("<IqqQ"), b"DTSR", b"DTSE"
_LEAST_BYTES = 64 << 20
"""Pushes are kept up to so many bytes at least before the state is written anew."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What made one version."""

    pushes: list[Push]
    options: Any
    """The optimizer's options in that step."""


class Journal:
    """A folder of one server's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.file: Any = None
        self.written = self.limit = 0

    def found(self) -> tuple[dict[str, Any], Iterator[Round]] | None:
        """The last state that was written in full, and what was applied after it; None where there is none."""
        versions = sorted(int(path.name.removeprefix("state.")) for path in self.folder.glob("state.*[0-9]"))
        if not versions:
            return None
        state = torch.load(self._state(versions[-1]), weights_only=True)
        return state, rounds(self._pushes(versions[-1]))

    def begin(self, version: int, state: Mapping[str, Any]) -> None:
        """Write the state of a version; pushes from now on come after it, and what was before goes."""
        part = self.folder / "part"
        torch.save(dict(state), part)
        file = _opened(self._pushes(version))
        part.rename(self._state(version))  # from here on this is the last state
        self.limit, self.written = max(_LEAST_BYTES, self._state(version).stat().st_size), 0
        self.close()
        self.file = file
        mine = {self._state(version), self._pushes(version)}
        for path in set(self.folder.iterdir()) - mine:
            path.unlink()

    def write(self, pushes: Sequence[Push], options: Any) -> None:
        """Note what is about to be applied."""
        said = json.dumps(options).encode()
        parts: list[Any] = [_ROUND.pack(_MAGIC, len(pushes), len(said)), said]
        for push in pushes:
            content: Tensor = push.content
            parts += [_PUSH.pack(push.worker, push.step, push.pulled, content.numel()), memoryview(content.numpy())]  # type: ignore[arg-type]
        for part in [*parts, _END]:
            rest = memoryview(part)
            self.written += len(rest)
            while rest:
                rest = rest[self.file.write(rest) :]

    @property
    def full(self) -> bool:
        """Whether the state is to be written anew."""
        return self.written > self.limit

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()

    def _state(self, version: int) -> Path:
        return self.folder / f"state.{version}"

    def _pushes(self, version: int) -> Path:
        return self.folder / f"pushes.{version}"


def rounds(path: Path) -> Iterator[Round]:
    """What is in a file of pushes; a last one that was cut off is not."""
    with contextlib.suppress(EOFError), path.open("rb") as file:
        take = _taker(file.read)
        while True:
            magic, count, size = _ROUND.unpack(take(_ROUND.size))
            if magic != _MAGIC:
                return
            options = json.loads(take(size))
            pushes = []
            for _ in range(count):
                worker, step, pulled, numel = _PUSH.unpack(take(_PUSH.size))
                content = torch.frombuffer(bytearray(take(numel)), dtype=torch.uint8)
                pushes.append(Push(worker=worker, step=step, pulled=pulled, content=content))
            take(len(_END))
            yield Round(pushes=pushes, options=options)


def _taker(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Reads all of what is asked for, or ends."""

    def take(size: int) -> bytes:
        found = read(size)
        if len(found) < size:
            raise EOFError
        return found

    return take


def _opened(path: Path) -> Any:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
