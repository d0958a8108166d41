"""Folders and files of this user alone, in places where other users can leave things of theirs.

Logs and end records lie in `.dtorch` under the working folder. One that another user has made, or a link of theirs, is
not used: whoever owns it could put links to this user's files there. The temporary folder takes its place then, as it
does where the working folder is gone or cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain

NAME = ".dtorch"


def home() -> Path:
    """The folder that runs have theirs in: `.dtorch` here, or one in the temporary folder.

    Raises:
        LaunchError: Neither is this user's alone.
    """
    with contextlib.suppress(OSError):
        here = Path.cwd() / NAME
        here.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(here):
            return here
    return folder(Path(tempfile.gettempdir()) / f"dtorch-{os.geteuid()}")


def folder(path: Path) -> Path:
    """Make a folder for this user alone, or take the one that is there if it is.

    Raises:
        LaunchError: It is another user's, a link, open to others, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if is_private(path):
            return path
        reason = "there already and not this user's alone"
    except OSError as error:
        reason = f"not to be had: {error.strerror}"
    do = "remove it, or start from a folder you may write to, with TMPDIR set to one of your own"
    raise LaunchError(explain(f"{path} is {reason}", "a private folder for logs", do))


def is_private(path: Path) -> bool:
    """True for a folder that only this user can read or write; a link is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0


def create(path: Path, flags: int, *, new: bool = True) -> int:
    """Open a file of this user's alone, and follow no link to it; `new`: it must not be there yet."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else 0), 0o600)


def _is_ours(path: Path) -> bool:
    """Whether this user has made a folder, or a link to one of their own; others may then not write there any more."""
    status = os.stat(path)
    if {os.lstat(path).st_uid, status.st_uid} != {os.geteuid()}:
        return False
    if status.st_mode & 0o022:  # some file systems have no modes: the script is as open there
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~0o022)
    return stat.S_ISDIR(status.st_mode)
