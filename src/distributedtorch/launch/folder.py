"""Where the ranks of one host meet: a folder that only their user can enter, in which every key is a file.

It has the calls of torch's stores, and needs neither a listener nor a server: the kernel lets nobody else in. Values
are put in place by rename, so a reader needs no lock, and a rank that is killed or stopped while it writes harms
nobody. Counters and compare-and-set take turns by a lock of the kernel's, which ends with the process that holds it.

Every process that uses the folder holds a shared lock on it, which cleaners of temporary folders respect. The last one
to leave removes it; what a killed job has left goes at the next start.

Not for several hosts: a file system they share may have no locks, and is slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.launch.private import is_private

VARIABLE = "DISTRIBUTEDTORCH_MEET"
"""Says where the folder is, in every process of a job that has one."""
GROUPS = "groups"
"""The file in which torch's process groups find each other."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
_FAR = ("nfs", "lustre", "cifs", "smb", "fuse", "beegfs", "gpfs", "ceph", "afs", "9p")
"""How the kernel calls file systems of other hosts, or what these names begin with."""


class Folder:
    """A store as torch has them, for the processes of one user on one host."""

    def __init__(self, path: Path, prefix: str = "", timeout_seconds: float = 60) -> None:
        if not is_private(path):
            given = f"{path}, where the ranks meet ({VARIABLE}), is gone or not this user's alone"
            raise LaunchError(explain(given, "the folder that the starter made", "start again"))
        self.path, self.prefix, self.seconds = path, prefix, timeout_seconds
        self._mark = secrets.token_hex(8)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait from now on."""
        self.seconds = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with self._words():
            self._write(self._file(key), value.encode())

    def get(self, key: str) -> bytes:
        """Read a value, as soon as it is there."""
        self.wait([key])
        with self._words():
            return self._file(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read some values, as soon as they are there."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have a value."""
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all of these have a value."""
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not self.check(keys):
            if time.monotonic() > deadline or not self.path.exists():
                raise LaunchError(self._vain(keys, seconds))
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and give its new value."""
        file = self._file(key)
        with self._words(), self._alone():
            now = int(file.read_text() if file.exists() else "0")
            if value or not now:
                self._write(file, str(now + value).encode())
        return now + value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value in place of the expected one (empty: none); the value there afterwards, or `expected`."""
        file = self._file(key)
        with self._words(), self._alone():
            now = file.read_bytes() if file.exists() else None
            if (now or b"") != expected.encode():
                return expected.encode() if now is None else now
            if now != desired.encode():
                self._write(file, desired.encode())
        return desired.encode()

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        file = self._file(key)
        with self._words(), self._alone():
            there = file.exists()
            file.unlink(missing_ok=True)
        return there

    def _file(self, key: str) -> Path:
        return self.path / hashlib.blake2b(f"{self.prefix}/{key}".encode(), digest_size=20).hexdigest()

    def _write(self, file: Path, value: bytes) -> None:
        part = self.path / f"{self._mark}.{os.getpid()}.{threading.get_native_id()}"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as new:
            new.write(value)
        part.replace(file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A block in which no other process or thread changes what is there."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has the same lock, and keeps it open
            os.close(lock)

    @contextlib.contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            given = f"{self.path}, where the ranks meet, cannot be used ({error.strerror or error})"
            do = f"look at that file system, and at who removes files there; {_ELSEWHERE}"
            raise LaunchError(explain(given, "a folder that stays and takes small files", do)) from error

    def _vain(self, keys: Sequence[str], seconds: float) -> str:
        if not self.path.exists():
            given, needed = f"{self.path}, where the ranks meet, is gone", "a folder that stays"
            return explain(given, needed, f"look at who removes files there; {_ELSEWHERE}")
        missing = ", ".join(key for key in keys if not self.check([key]))
        do = "look at the output of the other ranks"
        return explain(f"after {seconds:g} s no rank had said {missing}", "every rank to come here", do)


_ELSEWHERE = "TMPDIR names another place"


@contextlib.contextmanager
def meeting() -> Iterator[Path]:
    """A folder for one run of ranks that have ended when the block does."""
    path, held = make()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def make() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it."""
    reasons = []
    for base in _bases():
        try:
            _sweep(base)
            for _ in range(100):
                path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
                if (held := hold(path)) is not None:
                    return path, held
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
    given = f"no folder could be made for the ranks to meet in ({'; '.join(reasons)})"
    raise LaunchError(explain(given, "a local file system with room for small files", f"make room; {_ELSEWHERE}"))


def hold(path: Path) -> int | None:
    """Keep a folder from being removed until the result is closed; None: it is gone, or not this user's alone."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    fcntl.flock(held, fcntl.LOCK_SH)
    if is_private(path) and os.path.samestat(os.fstat(held), os.stat(path)):
        return held
    os.close(held)
    return None


def leave(path: Path, held: int) -> None:
    """Use a folder no more; the last one removes it."""
    os.close(held)
    _remove(path)


def _prefix() -> str:
    return f"distributedtorch-{os.geteuid()}."


def _sweep(base: Path) -> None:
    """Remove what killed jobs of this user have left."""
    with os.scandir(base) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.startswith(_prefix())]
    for path in left:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder that nobody holds."""
    if not is_private(path):
        return
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(folder)


def _bases() -> list[Path]:
    """Where the folder may be, best first. A user's own runtime folder is not among them: it goes when they log out."""
    found = dict.fromkeys(Path(base) for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"))
    return sorted(found, key=_is_far)


def _is_far(base: Path) -> bool:
    """Whether a folder lies on another host, as far as the kernel tells."""
    try:
        device = os.stat(base).st_dev
        rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    kinds = [row[row.index("-") + 1] for row in rows if row[2] == f"{os.major(device)}:{os.minor(device)}"]
    return any(kind.startswith(_FAR) for kind in kinds)
