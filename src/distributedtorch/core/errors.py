"""The errors a user can meet: each says what was given, what is needed, and what to do."""

from __future__ import annotations


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

    rank: int | None = None
    """Which one, where that is known."""


class RankError(DistributedTorchError):
    """A rank that `dt.launch` started has failed; the text has its traceback."""

    def __init__(self, text: str, *, rank: int, kind: str) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that failed first."""
        self.kind = kind
        """The name of its error's class; empty where it was killed or exited."""


def explain(given: str, needed: str, do: str) -> str:
    """One message in the library's three parts; control characters, of names in files perhaps, do not get into it."""
    said = f"{given}\n  needed: {needed}\n  do: {do}"
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in said)
