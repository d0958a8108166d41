"""Where checkpoints lie: one folder that holds one folder for each, on a disk or in any store that fsspec knows.

    000012-step-3000/            committed: checkpoint.json is in it
    .draft-1f0c.../              being written, on a disk
    .lock                        who writes here

On a disk: every file is flushed, then the draft's folder, then the draft is renamed, then this folder is flushed. A
kill at any moment leaves the committed ones as they were. Stores that cannot rename get the files under their final
name, and checkpoint.json last: a folder without it is not a checkpoint. Both kinds are read in the same way. Whoever
removes one takes checkpoint.json first; of a link to one the link is removed, and nothing it points at. What a dead
writer left is removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import posixpath
import re
import shutil
import socket
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributedtorch.core.errors import CheckpointError, explain

INDEX = "checkpoint.json"
FOLDER = re.compile(r"(\d{6,12})-step-(\d{1,15})")
_FILE = re.compile(r"checkpoint\.json|(model|state)-\d{5}\.safetensors")
_LEFT = re.compile(rf"{_FILE.pattern}|\.nfs[0-9a-f]+")
"""What a folder may hold that a dead writer left: NFS keeps files that were open when they were removed."""
_DRAFT = re.compile(r"\.(draft|gone)-[0-9a-f]{32}")
_LOCK, _MOST_IN_LOCK = ".lock", 1000
_MOST_NUMBER = 10**12 - 1


class Place(ABC):
    """A folder of checkpoints."""

    said: str
    """How the user calls it."""

    def committed(self) -> list[str]:
        """Names of the checkpoints, the newest first: folders called like one that have a checkpoint.json."""
        return [name for name in self._called_so() if self.is_finished(name)]

    def unfinished(self) -> list[str]:
        """Names of what is called like a checkpoint and is none: a save that was cut off, a file of the user's."""
        return [name for name in self._called_so() if not self.is_finished(name)]

    def _called_so(self) -> list[str]:
        return sorted((name for name in self.entries() if FOLDER.fullmatch(name)), key=_number, reverse=True)

    def is_finished(self, name: str) -> bool:
        """Whether it is a folder with a checkpoint.json. One that cannot be looked into is: reading it says why."""
        try:
            return INDEX in self.files(name)
        except OSError as error:
            return not _is_nothing(error)

    def next_name(self, step: int) -> str:
        """The name of the next checkpoint: later than every other's, whatever its step."""
        taken = {_number(name) for name in self.entries()}
        number = max(map(_number, self.committed()), default=0) + 1
        while number in taken:
            number += 1
        name = f"{number:06d}-step-{step}"
        if not FOLDER.fullmatch(name):
            given = f"the next checkpoint in {self.said} would be called {name}"
            needed = f"a number of at most {_MOST_NUMBER} and a step of at most 15 digits"
            raise CheckpointError(explain(given, needed, "save to another folder"))
        return name

    def is_link(self, name: str) -> bool:
        """Whether a checkpoint's name here is a link to a folder elsewhere."""
        return False

    def leads_to(self, name: str) -> str:
        """The checkpoint here that a name leads to: itself, unless it is a link to another one here."""
        return name

    def _is_abandoned(self, name: str) -> bool:
        """Whether it is what a dead writer left of a checkpoint."""
        if not FOLDER.fullmatch(name) or self.is_link(name) or self.is_finished(name):
            return False
        try:
            there = self.files(name)
        except OSError:  # a file
            return False
        return INDEX not in there and all(_LEFT.fullmatch(file) for file in there)

    def file(self, folder: str, name: str) -> str:
        """A file's path, for messages."""
        return "/".join(part for part in (self.said.rstrip("/"), folder, name) if part)

    @abstractmethod
    def entries(self) -> list[str]:
        """Names of what is here; none where the folder does not exist."""

    @abstractmethod
    def lock(self) -> None:
        """Be the only writer here from now on, for the life of the process; refuse where another is."""

    @abstractmethod
    def begin(self, name: str, bytes_needed: int) -> str:
        """Make room for a new checkpoint, and clear away what dead writers left. The result is what to write into."""

    @abstractmethod
    def writing(
        self, folder: str, name: str, *, private: bool
    ) -> contextlib.AbstractContextManager[Callable[..., Any]]:
        """A block in which a new file is written by calls; after it the file is there to stay."""

    @abstractmethod
    def commit(self, draft: str, name: str) -> None:
        """Make what was written the newest checkpoint. Its checkpoint.json is written already."""

    @abstractmethod
    def drop(self, draft: str) -> None:
        """Remove what was being written."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a checkpoint."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """The files of a checkpoint with their sizes."""

    @abstractmethod
    def written(self, folder: str) -> float | None:
        """When its checkpoint.json was written, in seconds since 1970; None where the store does not say."""

    @abstractmethod
    def opened(self, folder: str, name: str) -> tuple[int, Callable[[int, memoryview], int]]:
        """A file's size, and a call that reads from an offset into memory."""


def of(path: str | os.PathLike[str]) -> Place:
    """The place that a path or an address (`s3://...`) names."""
    said = os.fspath(path)
    return Remote(said) if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", said) else Local(said)


def split(path: str) -> tuple[str, str | None]:
    """A folder of checkpoints, and the name of one where the path ends in it."""
    said = path if "://" in path or os.path.basename(path.rstrip("/")) not in (".", "..") else os.path.abspath(path)
    root, slash, last = said.rstrip("/").rpartition("/")
    return (root or slash or ".", last) if FOLDER.fullmatch(last) else (path, None)


def _number(name: str) -> int:
    found = FOLDER.fullmatch(name)
    return int(found[1]) if found else -1


def _is_nothing(error: OSError) -> bool:
    """Whether there is no such folder, as opposed to one that cannot be read."""
    return isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ELOOP


class Local(Place):
    """A folder on a disk that all ranks see."""

    def __init__(self, path: str) -> None:
        self.said, self.root = path, Path(os.path.realpath(path))

    def entries(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            given = f"{self.said} is a file"
            raise CheckpointError(explain(given, "a folder for checkpoints", "give another path")) from None

    def lock(self) -> None:
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            _flush(self.root.parent)
        path = str(self.root / _LOCK)
        if path in _locks and _locks[path][0] == os.getpid() and os.path.exists(path):
            return
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.read(handle, _MOST_IN_LOCK).decode(errors="replace")
            os.close(handle)
            raise CheckpointError(_taken(self.said, who)) from error
        os.truncate(handle, 0)
        os.pwrite(handle, _me().encode(), 0)
        _locks[path] = os.getpid(), handle

    def begin(self, name: str, bytes_needed: int) -> str:
        for entry in self.entries():
            if _DRAFT.fullmatch(entry) or self._is_abandoned(entry):
                self.drop(entry)
        free = shutil.disk_usage(self.root).free
        if bytes_needed > free:
            given = f"{self.said} needs {bytes_needed:,} bytes and {free:,} are free"
            raise CheckpointError(explain(given, "space beside the old ones", "make room, or save elsewhere"))
        draft = f".draft-{uuid.uuid4().hex}"
        (self.root / draft).mkdir(mode=0o700)
        return draft

    @contextmanager
    def writing(self, folder: str, name: str, *, private: bool) -> Iterator[Callable[..., Any]]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.root / folder / name, flags, 0o600 if private else 0o666)

        def write(content: memoryview) -> None:
            while content:
                content = content[os.write(handle, content) :]

        try:
            yield write
            os.fsync(handle)
        finally:
            os.close(handle)

    def commit(self, draft: str, name: str) -> None:
        if any(path.stat().st_mode & stat.S_IROTH for path in (self.root / draft).iterdir()):
            (self.root / draft).chmod(0o755)
        _flush(self.root / draft)
        os.rename(self.root / draft, self.root / name)
        _flush(self.root)

    def drop(self, draft: str) -> None:
        with contextlib.suppress(OSError):
            if self.is_link(draft):
                os.unlink(self.root / draft)
        shutil.rmtree(self.root / draft, ignore_errors=True)  # follows no link

    def remove(self, name: str) -> None:
        _refuse_another(name)
        if self.is_link(name):
            os.unlink(self.root / name)
            return
        folder = os.open(self.root / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.unlink(INDEX, dir_fd=folder)  # half a checkpoint must not look like one
            os.fsync(folder)
        finally:
            os.close(folder)
        shutil.rmtree(self.root / name, ignore_errors=True)

    def is_finished(self, name: str) -> bool:
        try:
            os.lstat(self.root / name / INDEX)
        except OSError as error:
            return not _is_nothing(error)
        return True

    def is_link(self, name: str) -> bool:
        return os.path.islink(self.root / name)

    def leads_to(self, name: str) -> str:
        real = Path(os.path.realpath(self.root / name))
        return real.name if real.parent == self.root else name

    def files(self, folder: str) -> dict[str, int]:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self.root / folder)}

    def written(self, folder: str) -> float | None:
        return os.stat(self.root / folder / INDEX, follow_symlinks=False).st_mtime

    def opened(self, folder: str, name: str) -> tuple[int, Callable[[int, memoryview], int]]:
        handle = os.open(self.root / folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(handle)
        read = _Opened(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a plain file")
        return status.st_size, read


class _Opened:
    """An open file, closed when nobody reads it any more."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __call__(self, offset: int, out: memoryview) -> int:
        done = 0
        while done < len(out):
            got = os.preadv(self.handle, [out[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def __del__(self) -> None:
        os.close(self.handle)


def _flush(path: Path) -> None:
    """A folder's entries to the disk, not only to the system's memory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_locks: dict[str, tuple[int, int]] = {}
"""Where this process writes: process number and open lock."""


class Remote(Place):
    """A folder in a store behind fsspec: objects appear whole when they are closed, and nothing is renamed."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # torch brings it; only addresses need it

        self.said = address
        try:
            self.store, self.root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            do = "install the package it names, or save to a path"
            raise CheckpointError(explain(f"{address}: {error}", "a store that fsspec can open", do)) from error
        self.root = self.root.rstrip("/")

    def entries(self) -> list[str]:
        self.store.invalidate_cache()
        try:
            return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in self.store.ls(self.root, detail=True)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def lock(self) -> None:
        path = f"{self.root}/{_LOCK}"
        if path in _remote_locks:
            return
        with contextlib.suppress(FileNotFoundError):
            who = self.store.cat_file(path, start=0, end=_MOST_IN_LOCK).decode(errors="replace")
            if not _dead(who):
                raise CheckpointError(_taken(self.said, who))
        self.store.makedirs(self.root, exist_ok=True)
        mine = _me()
        self.store.pipe_file(path, mine.encode())
        if self.store.cat_file(path).decode(errors="replace") != mine:
            raise CheckpointError(_taken(self.said, "another job that began just now"))
        _remote_locks[path] = mine
        atexit.register(_give_up, self.store, path, mine)

    def begin(self, name: str, bytes_needed: int) -> str:
        for entry in self.entries():
            if self._is_abandoned(entry):
                self.store.rm(f"{self.root}/{entry}", recursive=True)
        return name

    @contextmanager
    def writing(self, folder: str, name: str, *, private: bool) -> Iterator[Callable[..., Any]]:
        self.store.makedirs(f"{self.root}/{folder}", exist_ok=True)
        opened = self.store.open(f"{self.root}/{folder}/{name}", "wb")
        try:
            yield opened.write
        except BaseException:
            if hasattr(opened, "discard"):
                with contextlib.suppress(Exception):
                    opened.discard()
            raise
        opened.close()

    def commit(self, draft: str, name: str) -> None:
        return  # checkpoint.json was the commit

    def drop(self, draft: str) -> None:
        with contextlib.suppress(Exception):
            self.store.rm(f"{self.root}/{draft}", recursive=True)

    def remove(self, name: str) -> None:
        _refuse_another(name)
        if self.is_link(name):
            self.store.rm_file(f"{self.root}/{name}")
            return
        self.store.rm_file(f"{self.root}/{name}/{INDEX}")
        self.store.rm(f"{self.root}/{name}", recursive=True)

    def is_finished(self, name: str) -> bool:
        try:
            self.store.info(f"{self.root}/{name}/{INDEX}")
        except OSError as error:
            return not _is_nothing(error)
        return True

    def is_link(self, name: str) -> bool:
        said = self._said_of(name)
        return bool(said.get("islink")) or said.get("type") == "link"

    def leads_to(self, name: str) -> str:
        where = posixpath.join(self.root, str(self._said_of(name).get("destination") or name))
        folder, last = posixpath.split(posixpath.normpath(where))
        return last if folder == self.root else name

    def _said_of(self, name: str) -> dict[str, Any]:
        try:
            return dict(self.store.info(f"{self.root}/{name}"))
        except OSError:
            return {}

    def files(self, folder: str) -> dict[str, int]:
        self.store.invalidate_cache()
        there = self.store.ls(f"{self.root}/{folder}", detail=True)
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in there}

    def written(self, folder: str) -> float | None:
        try:
            return float(self.store.modified(f"{self.root}/{folder}/{INDEX}").timestamp())
        except NotImplementedError:
            return None

    def opened(self, folder: str, name: str) -> tuple[int, Callable[[int, memoryview], int]]:
        path = f"{self.root}/{folder}/{name}"

        def read(offset: int, out: memoryview) -> int:
            content = self.store.cat_file(path, start=offset, end=offset + len(out))
            out[: len(content)] = content
            return len(content)

        return int(self.store.size(path)), read


_remote_locks: dict[str, str] = {}


def _refuse_another(name: str) -> None:
    """Nothing is removed that is not called like a checkpoint."""
    if not FOLDER.fullmatch(name):
        raise CheckpointError(explain(f"{name!r} to be removed", "a checkpoint", "see dtorch checkpoint ls"))


def _give_up(store: Any, path: str, mine: str) -> None:
    with contextlib.suppress(Exception):
        if store.cat_file(path).decode() == mine:
            store.rm_file(path)


def _me() -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex})


def _dead(who: str) -> bool:
    """Whether a lock's writer was a process of this host that is gone."""
    try:
        said = json.loads(who)
        if said["host"] != socket.gethostname():
            return False
        os.kill(int(said["pid"]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return False
    return int(said["pid"]) == os.getpid()


def _taken(path: str, who: str) -> str:
    given = f"{path} is being written by another job ({who.strip()[:200]})"
    do = f"give each job a folder of its own; where that job is gone for good, remove {path.rstrip('/')}/{_LOCK}"
    return explain(given, "one writer", do)
