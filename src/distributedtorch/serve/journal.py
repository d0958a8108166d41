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
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from distributedtorch.core.errors import CheckpointError, explain
from distributedtorch.serve.board import Push

_ROUND, _PUSH, _END, _MAGIC = struct.Struct("<4sII"), struct.Struct("<IqqqQ"), struct.Struct("<I"), b"DTSR"
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
        """The last state that was written in full, and what was applied after it; None where there is none.

        Raises:
            CheckpointError: It cannot be read.
        """
        versions = sorted(int(path.name.removeprefix("state.")) for path in self.folder.glob("state.*[0-9]"))
        if not versions:
            return None
        try:
            state = torch.load(self._state(versions[-1]), weights_only=True)
        except Exception as error:
            raise CheckpointError(_unreadable(self._state(versions[-1]), str(error))) from error
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
            numbers = (push.worker, push.step, push.pulled, push.late, push.content.numel())
            parts += [_PUSH.pack(*numbers), push.content.numpy().data]
        total = 0
        for part in parts:
            total = zlib.crc32(part, total)
        for part in [*parts, _END.pack(total)]:
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
    """What is in a file of pushes; a last one that was cut off is not.

    Raises:
        CheckpointError: Something else than the end is missing.
    """
    with contextlib.suppress(EOFError), path.open("rb") as file:
        while True:
            record = _Record(file, path)
            magic, count, size = _ROUND.unpack(record.take(_ROUND.size))
            if magic != _MAGIC:
                raise CheckpointError(_unreadable(path, "no push where one begins"))
            options = json.loads(record.take(size) or b"null")
            pushes = []
            for _ in range(count):
                worker, step, pulled, late, numel = _PUSH.unpack(record.take(_PUSH.size))
                content = torch.frombuffer(bytearray(record.take(numel)), dtype=torch.uint8)
                pushes.append(Push(worker=worker, step=step, pulled=pulled, late=late, content=content))
            record.end()
            yield Round(pushes=pushes, options=options)


class _Record:
    """One round in a file, read part by part."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.total = file, path, 0

    def take(self, size: int) -> bytes:
        """The next bytes.

        Raises:
            EOFError: The file ends before.
        """
        if size > os.fstat(self.file.fileno()).st_size - self.file.tell():
            raise EOFError
        found = self.file.read(size)
        self.total = zlib.crc32(found, self.total)
        return found

    def end(self) -> None:
        """Compare the sum over all that was taken."""
        total = self.total
        if _END.unpack(self.take(_END.size))[0] != total:
            raise CheckpointError(_unreadable(self.path, "bytes that are not as they were written"))


def _unreadable(path: Path, why: str) -> str:
    given = f"what a server had applied cannot be read again from {path}: {why}"
    return explain(given, "the file as it was written", "start the job anew; it goes on from its checkpoint")


def _opened(path: Path) -> Any:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
