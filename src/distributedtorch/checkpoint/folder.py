"""One checkpoint is one folder, put in place by rename: a kill at any moment leaves the old one or the new one.

    model.0.safetensors, optimizer.0.safetensors, ...   full plain tensors, by name
    run.json   {"sha256": of the rest, "run": {format, versions, plan, world, steps, cursors, state, files}}

A save of `name` writes `.name.tmp-<pid>` beside it (files 0600, folder 0700), flushes each file and the folder to disk,
renames a present `name` to `.name.aside`, the new one to `name`, flushes the parent, and removes `.name.aside`. Between
the two renames only `.name.aside` is there: it is read instead, and the next save puts it back. What a dead writer left
is removed by the next save. Every byte is hashed before it is used; nothing but the files named in run.json is read,
and a folder with other files in it is never replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from distributedtorch.core.errors import CheckpointError, explain

RUN_FILE, FORMAT = "run.json", 1
_OURS = re.compile(r"run\.json|(model|optimizer|scheduler)\.\d{1,6}\.safetensors")
_HEAD, _HEX = b'{"sha256": "', 64
_WRONG_CONTENT = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
_DO = "check the path, or load an earlier checkpoint"


def write(path: Path, run: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a checkpoint and put it in place of the one at `path`, which stays if anything fails.

    Raises:
        CheckpointError: The place is not one for a checkpoint, or is too small.
        OSError, SafetensorError: The system's own words.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _tidy(path)
    _check_place(path, sum(t.nbytes for part in tensors.values() for t in part.values()))
    draft = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        draft.mkdir(mode=0o700)
        files = {name: _write_tensors(draft / name, dict(part)) for name, part in tensors.items()}
        _write_run(draft / RUN_FILE, {"format": FORMAT, **run, "files": files})
        _flush(draft)
        _put_in_place(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], str]:
    """What `write` was given (run, and tensors by file), and the hash that stands for all of it.

    Raises:
        CheckpointError: Nothing is there, or not every byte is as it was written.
    """
    folder = _folder_of(path)
    try:
        raw = _bytes_of(folder / RUN_FILE)
        if not raw.startswith(_HEAD):
            raise ValueError(f"{RUN_FILE} begins with {raw[:12]!r}")
        rest = raw[len(_HEAD) + _HEX :]
        digest = check_hash(folder / RUN_FILE, rest, raw[len(_HEAD) :][:_HEX].decode("ascii", "replace"))
        run = json.loads(raw)["run"]
        if run["format"] != FORMAT:
            given = f"{path} has format {run['format']}, written by {run.get('versions')}"
            raise CheckpointError(explain(given, f"format {FORMAT}", "load it with the version that wrote it"))
        tensors = {name: _read_tensors(folder, name, card) for name, card in run["files"].items()}
    except OSError as error:
        raise CheckpointError(explain(f"{path} cannot be read: {error}", "a readable checkpoint", _DO)) from None
    except _WRONG_CONTENT as error:
        given = f"{folder} holds something else than dt.save writes ({type(error).__name__}: {error})"
        raise CheckpointError(explain(given, "a folder written by dt.save", _DO)) from None
    return run, tensors, digest


def check_hash(file: Path, content: bytes, written: str) -> str:
    """Refuse content that is not what was written."""
    found = hashlib.sha256(content).hexdigest()
    if found != written:
        given = f"{file} has changed since it was written (sha256 {found[:12]}..., written {written[:12]!r}...)"
        raise CheckpointError(explain(given, "the bytes that were written", _DO))
    return found


def _folder_of(path: Path) -> Path:
    """The folder to read: `path`, or the one a writer had put aside when it was killed."""
    aside = _aside(path)
    if (path / RUN_FILE).is_file():
        return path
    if not path.exists() and (aside / RUN_FILE).is_file():
        return aside
    what = "is a file" if path.is_file() else f"has no {RUN_FILE}" if path.exists() else "does not exist"
    raise CheckpointError(explain(f"{path} {what}", "a folder written by dt.save", _DO))


def _bytes_of(file: Path, size: int | None = None) -> bytes:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        there = os.fstat(opened.fileno()).st_size
        if size is not None and there != size:
            given = f"{file} has {there} bytes, {size} were written"
            raise CheckpointError(explain(given, "the whole file", _DO))
        return opened.read()


def _read_tensors(folder: Path, name: str, card: dict[str, Any]) -> dict[str, Tensor]:
    if not _OURS.fullmatch(name):
        raise ValueError(f"file name {name!r}")
    content = _bytes_of(folder / name, int(card["bytes"]))
    check_hash(folder / name, content, card["sha256"])
    return load(content)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    save_file(tensors, file)
    file.chmod(0o600)
    _flush(file)
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _write_run(file: Path, run: Mapping[str, Any]) -> None:
    rest = b'", "run": ' + json.dumps(run, indent=1, allow_nan=False).encode() + b"}\n"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(_HEAD + hashlib.sha256(rest).hexdigest().encode() + rest)
    _flush(file)


def _flush(path: Path) -> None:
    """To the disk, not only to the system's memory; files and folders alike."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(draft: Path, path: Path) -> None:
    aside = _aside(path)
    replaces = (path / RUN_FILE).exists()
    if replaces:
        path.rename(aside)
    try:
        draft.rename(path)
    except OSError:
        if replaces:
            aside.rename(path)
        raise
    _flush(path.parent)
    if replaces:
        _remove(aside)


def _check_place(path: Path, bytes_needed: int) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(explain(f"{path} is a file", "a folder of its own", "give dt.save another path"))
    foreign = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name)) if path.exists() else []
    if foreign:
        given = f"{path} holds files that dt.save did not write ({', '.join(foreign[:3])})"
        raise CheckpointError(explain(given, "a folder of its own, replaced as a whole", "give dt.save another path"))
    free = shutil.disk_usage(path.parent).free
    if bytes_needed > free:
        given = f"{path} needs {bytes_needed:,} bytes and {free:,} are free"
        raise CheckpointError(explain(given, "space beside the old one", "make room, or give dt.save another path"))


def _tidy(path: Path) -> None:
    """Put back or remove what writers that were killed left behind."""
    aside = _aside(path)
    if aside.exists():
        if (path / RUN_FILE).exists():
            _remove(aside)
        else:
            aside.rename(path)
    for entry in path.parent.iterdir():
        left = re.fullmatch(re.escape(f".{path.name}.tmp-") + r"(\d{1,9})", entry.name)
        if left and not _lives(int(left[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _lives(pid: int) -> bool:
    """Whether another process of this number is at work here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _remove(folder: Path) -> None:
    """run.json first: half a checkpoint must not look like one."""
    (folder / RUN_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.aside")
