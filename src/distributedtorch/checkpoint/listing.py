"""Many checkpoints at a glance, and the check of all their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributedtorch.checkpoint import index
from distributedtorch.checkpoint.aligned import clip, count, say, size, table, when
from distributedtorch.checkpoint.index import NewerError, Reader
from distributedtorch.checkpoint.place import FOLDER, INDEX, Place
from distributedtorch.core.errors import CheckpointError

_HEAD: tuple[str, ...] = ("name", "step", "plan", "world", "size", "tensors", "written", "")
_RIGHT = (1, 3, 4, 5)
_WIDEST, _SHOWN = 40, 5


# At a glance.


def ls(there: Place, names: Sequence[str]) -> None:
    """A row for every checkpoint, the newest first. Indexes and sizes are looked at, contents are not read."""
    rows, newest = [_HEAD], False
    for name in names:
        row, good = _row(there, name)
        if good and not newest:
            row, newest = (*row[:-1], "newest"), True
        rows.append(row)
    say(f"{there.said}: {count(len(names), 'checkpoint')}", *table(rows, right=_RIGHT, indent="  "))
    others = there.unfinished()
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        say(f"  no checkpoints, as they have no {INDEX}: {', '.join(others[:_SHOWN])}{more}")


def _row(there: Place, name: str) -> tuple[tuple[str, ...], bool]:
    """A checkpoint's row, and whether it is good as far as can be seen."""
    found = FOLDER.fullmatch(name)
    bare = (name, found[2] if found else "")
    try:
        files = there.files(name)
        total = size(sum(files.values()))
        at = when(there.written(name))
    except OSError as error:
        return (*bare, "", "", "", "", "", f"damaged: {error}"), False
    try:
        read = index.read(there, name)
    except CheckpointError as error:
        kind = "newer" if isinstance(error, NewerError) else "damaged"
        return (*bare, "", "", total, "", at, f"{kind}: {fault_in(there, name, error)}"), False
    wrong = [
        f"{file} has {files[file]:,} of {card.bytes:,} bytes" if file in files else f"{file} is missing"
        for file, card in read.files.items()
        if files.get(file) != card.bytes
    ]
    plan, world = (clip(str(read.content.get(word, "")), _WIDEST) for word in ("plan", "world"))
    note = f"damaged: {wrong[0]}" if wrong else ""
    return (*bare, plan, world, total, f"{len(read.tensors):,}", at, note), not wrong


def fault_in(there: Place, name: str, error: CheckpointError) -> str:
    """What is wrong in one line, without the path that the reader sees already."""
    return str(error).splitlines()[0].replace(f"{there.file(name, '')}/", "")


# Every byte.


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about one file."""

    file: str
    bytes: int
    fault: str = ""
    """What is wrong; nothing where all is well."""


def verify(there: Place, names: Sequence[str]) -> bool:
    """Read every byte of these checkpoints and say about each file how it is. The result: whether all are whole.

    Raises:
        NewerError: One of them is of a later version, and nothing is wrong with the others.
    """
    whole, newer = True, None
    for name in names:
        say(name)
        bad, read = 0, 0
        try:
            for verdict in _verdicts(there, name):
                fault = verdict.fault.removeprefix(f"{verdict.file} ")
                how = f"WRONG  {fault}" if verdict.fault else f"ok     {size(verdict.bytes)}"
                say(f"  {verdict.file:<26}  {how}")
                bad, read = bad + bool(verdict.fault), read + verdict.bytes
        except NewerError as error:
            say(f"  {INDEX:<26}  not checked: {fault_in(there, name, error)}")
            newer = error
            continue
        say(f"  damaged: {count(bad, 'file')}" if bad else f"  whole: {size(read)} read")
        whole = whole and not bad
    if whole and newer is not None:
        raise newer
    return whole


def is_whole(there: Place, name: str) -> bool:
    """Whether every byte is as it was written."""
    try:
        return not any(verdict.fault for verdict in _verdicts(there, name))
    except NewerError:
        return False


def is_damaged(there: Place, name: str) -> bool:
    """Whether something is wrong with it; one of a later version cannot be judged, and is not."""
    try:
        return any(verdict.fault for verdict in _verdicts(there, name))
    except NewerError:
        return False


def _verdicts(there: Place, name: str) -> Iterator[Verdict]:
    """One for every file, as they are read."""
    try:
        read = index.read(there, name)
        seen = there.files(name)
    except NewerError:
        raise
    except CheckpointError as error:
        yield Verdict(file=INDEX, bytes=0, fault=fault_in(there, name, error))
        return
    except OSError as error:
        yield Verdict(file=INDEX, bytes=0, fault=str(error))
        return
    yield Verdict(file=INDEX, bytes=seen.get(INDEX, 0))
    for file, card in sorted(read.files.items()):
        reader = Reader(there, name, read)  # a new one for each file: a reader keeps a block of every file it has read
        try:
            reader.check_file(file, range(len(card.blocks)))
            yield Verdict(file=file, bytes=card.bytes)
        except CheckpointError as error:
            yield Verdict(file=file, bytes=card.bytes, fault=fault_in(there, name, error))
    for file in Reader(there, name, read).strangers():
        yield Verdict(file=file, bytes=seen.get(file, 0), fault="does not belong to this checkpoint")
