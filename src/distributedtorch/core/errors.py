"""The errors a user can meet: each says what was given, what is needed, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import IO


class DistributedTorchError(RuntimeError):
    """Every error of this library."""


class PlanError(DistributedTorchError, ValueError):
    """A plan that cannot be read, or whose words contradict each other or the world."""


class UsageError(DistributedTorchError, ValueError):
    """A call or an object that cannot be distributed as given."""


class LaunchError(DistributedTorchError):
    """Processes could not be started, joined or matched."""


class CheckpointError(DistributedTorchError):
    """A saved file that cannot be written, read or matched to the model."""


class DesyncError(DistributedTorchError):
    """Ranks disagree about what to do next: another batch, another exchange, another line."""


class LockError(DistributedTorchError):
    """A lock that was not to be had in the time given."""


class PeerError(DistributedTorchError):
    """Another rank ended or failed. Never the first cause: the supervisor looks further for that."""

    rank: int | None
    """Which one, where that is known."""

    def __init__(self, *said: object, rank: int | None = None) -> None:
        super().__init__(*said)
        self.rank = rank


class RankError(DistributedTorchError):
    """A rank that `dt.launch` started has failed; the text has its traceback."""

    def __init__(self, text: str, *, rank: int, kind: str) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that failed first."""
        self.kind = kind
        """The name of its error's class; empty where it was killed or exited."""


_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Kinds of characters that a terminal acts on instead of showing them."""


def shown(text: str) -> str:
    """What other processes wrote, fit for a terminal: colours are left out, other control characters are spelt out."""
    if text.isascii() and text.isprintable():
        return text
    signs = _COLOURS.sub("", text)
    return "".join(
        sign.encode("unicode_escape").decode() if sign not in "\n\t" and unicodedata.category(sign) in _UNSEEN else sign
        for sign in signs
    )


def explain(given: str, needed: str, do: str) -> str:
    """One message in the library's three parts; control characters, of names in files perhaps, are spelt out."""
    return shown(f"{given}\n  needed: {needed}\n  do: {do}")


def tell(text: str) -> None:
    """Print a line on standard error; a reader that is gone, or a closed one, costs the line and not the run."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError), unread(sys.stderr):
            print(shown(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def unread(stream: IO[str]) -> Iterator[None]:
    """A block that writes to a stream. Where nobody will ever read that, the rest goes nowhere, without an error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
