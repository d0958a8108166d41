"""`dtorch checkpoint`: what lies in a folder of checkpoints, whether it is whole, and removing what is not needed.

Torch is imported when a checkpoint is there to be read, and not before.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from distributedtorch.checkpoint import place
from distributedtorch.checkpoint.aligned import count, say, size
from distributedtorch.checkpoint.place import INDEX, Local, Place
from distributedtorch.core.errors import CheckpointError, DistributedTorchError, explain

_SHOWN = 3


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name, (help_, path) in _ACTIONS.items():
        action = actions.add_parser(name, help=help_, description=help_)
        action.add_argument("path", metavar="PATH", help=path)
        if name == "show":
            action.add_argument("--all", action="store_true", help="shorten nothing")
        if name == "rm":
            action.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N in the folder")
            action.add_argument("--yes", action="store_true", help="do not ask")


_EITHER = "a folder of checkpoints, or an address (s3://bucket/folder); or one checkpoint in it"
_ACTIONS = {
    "ls": ("list the checkpoints in a folder", _EITHER),
    "show": ("say what one checkpoint holds: the newest in a folder, or the one named", _EITHER),
    "verify": ("read every byte, say what is wrong; exit code 0 where nothing is, else 1", _EITHER),
    "rm": ("remove one checkpoint, or all but the newest N", "one checkpoint, or a folder of them with --keep"),
}


def act(arguments: Namespace) -> int:
    """Carry out one action and give its exit code."""
    try:
        return _act(arguments, find(arguments.path))
    except DistributedTorchError:
        raise
    except OSError as error:
        do = "check the path and who may read and write there"
        raise CheckpointError(explain(f"{arguments.path}: {error}", "a folder that can be read", do)) from None
    except Exception as error:
        if "://" not in arguments.path:
            raise
        given = f"{arguments.path}: {type(error).__name__}: {error}"  # every store has errors of its own
        do = "check the address and the access to it"
        raise CheckpointError(explain(given, "a store that can be read", do)) from None


def _act(arguments: Namespace, found: Found) -> int:
    if arguments.action == "rm":
        return _rm(found, arguments.keep, yes=arguments.yes)
    from distributedtorch.checkpoint import listing, picture

    if arguments.action == "ls":
        listing.ls(found.there, found.names)
    elif arguments.action == "show":
        picture.show(found.there, found.committed, found.one or found.committed[0], whole=arguments.all)
    elif not listing.verify(found.there, found.names):
        return 1
    return 0


# What a path means.


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoints that a path means."""

    there: Place
    committed: tuple[str, ...]
    """All that are in the folder, the newest first."""
    one: str | None
    """The one that the path names, where it names one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The one, or all."""
        return self.committed if self.one is None else (self.one,)


def find(path: str) -> Found:
    """The checkpoints that a path means: a folder of them, or one.

    Raises:
        CheckpointError: There are none, or not the one that is named.
    """
    root, one = place.split(path)
    there = place.of(root)
    committed = tuple(there.committed())
    if one is not None and one not in committed and one in there.unfinished():
        given = f"{there.file(one, '')} was not finished: it has no {INDEX}"
        do = "leave it: the next dt.save there removes what a save that was cut off has left; or remove it by hand"
        raise CheckpointError(explain(given, "a checkpoint", do))
    if not committed or (one is not None and one not in committed):
        raise CheckpointError(_nothing(there, path, committed))
    return Found(there=there, committed=committed, one=one)


def _nothing(there: Place, path: str, committed: Sequence[str]) -> str:
    needed = "a folder written by dt.save, or a checkpoint in one"
    if committed:
        return explain(f"there is no {path}", needed, f"name one that is there: {_few(committed)}")
    if isinstance(there, Local) and not there.root.exists():
        return explain(f"there is no folder {there.said}", needed, "check the path")
    entries = sorted(entry for entry in there.entries() if not entry.startswith("."))
    if not entries:
        return explain(f"{there.said} is empty", needed, "check the path; a run that saves there may not have begun to")
    return explain(f"{there.said} holds no checkpoint, but {_few(entries)}", needed, "check the path")


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


# Removing.


def _rm(found: Found, keep: int | None, *, yes: bool) -> int:
    """Remove what is to go, when that is safe, agreed to, and nobody else writes there."""
    there = found.there
    going = _going(found, keep)
    if not going:
        say(f"nothing to remove: {count(len(found.committed), 'checkpoint')} in {there.said}")
        return 0
    staying = [name for name in found.committed if name not in going]
    if not (yes and found.one):
        _refuse_to_lose_all(there, going, staying)
    num_bytes = {name: 0 if there.is_link(name) else sum(there.files(name).values()) for name in going}
    if not yes and not _agreed(there, num_bytes):
        say("nothing was removed")
        return 1
    there.lock()
    if not set(going) <= set(there.committed()) or not set(staying) <= set(there.committed()):
        given = f"the checkpoints in {there.said} have changed since they were looked at"
        raise CheckpointError(explain(given, "a folder that nobody else changes", "look again"))
    for name in going:
        there.remove(name)
        if name in there.entries():
            given = f"{there.file(name, '')} could not be removed as a whole, and is no checkpoint any more"
            raise CheckpointError(explain(given, "files that may be removed", "remove what is left by hand"))
        say(f"removed {name} ({size(num_bytes[name])})")
    return 0


def _going(found: Found, keep: int | None) -> list[str]:
    """What is to be removed. What is unfinished is left to the next writer, who knows that its writer is dead."""
    if found.one is not None and keep is not None:
        given, do = f"--keep {keep} and the checkpoint {found.one}", "leave out --keep, or give the folder"
        raise CheckpointError(explain(given, "one of them", do))
    if found.one is None and (keep is None or keep < 1):
        given = f"{found.there.said}, a folder" if keep is None else f"--keep {keep}"
        do = f"dtorch checkpoint rm {found.there.file(found.committed[-1], '')}, or --keep N"
        raise CheckpointError(explain(given, "the name of one checkpoint, or how many stay (1 or more)", do))
    if found.one is not None:
        return [found.one]
    needed = {found.there.leads_to(name) for name in found.committed[:keep]}  # by links that stay, too
    return [name for name in found.committed[keep:] if name not in needed]


def _refuse_to_lose_all(there: Place, going: Sequence[str], staying: Sequence[str]) -> None:
    """See that one of those that stay is whole, every byte, or that none of those that go is."""
    from distributedtorch.checkpoint import listing

    apart = [name for name in staying if there.leads_to(name) not in going]  # not links to what goes
    whole = next((name for name in apart if listing.is_whole(there, name)), None)
    if whole is not None:
        say(f"{whole} stays: every byte was read, it is whole")
        return
    good = next((name for name in going if not listing.is_damaged(there, name)), None)
    if good is not None:
        given = f"no checkpoint that stays in {there.said} is whole, and {good} would be removed"
        do = f"keep it; to remove it all the same: dtorch checkpoint rm {there.file(good, '')} --yes"
        raise CheckpointError(explain(given, "one good checkpoint that stays", do))


def _agreed(there: Place, num_bytes: dict[str, int]) -> bool:
    """Ask."""
    say(f"to be removed from {there.said}:", *(f"  {name}  {size(number)}" for name, number in num_bytes.items()))
    try:
        return input("remove for good? [y/N] ").strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        say("")
        return False
    except EOFError:
        say("")
        raise CheckpointError(explain("nobody to ask", "an answer", "give --yes")) from None
