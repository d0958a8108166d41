"""What a rank leaves behind when it ends, so that the supervisor can name the first cause and not the loudest one.

Each rank of a `dtorch` run writes `end.<rank>.json` (mode 0600, put in place by rename) into the run folder: raised,
exited or ended, the error, the last lines of its traceback, the user's line, the step, the monotonic time, and whether
the error is only the consequence of another rank's end. Through the fifo `news` in the same folder it tells the
supervisor at once, even when the process itself takes long to leave.

Under mpirun, srun and torchrun there is no supervisor of ours: they end the others when one process ends with an error,
and show what each prints. There a rank prints its error, as one line where it is a mere consequence or where a rank of
its host has printed the same one; under mpirun and srun it says its number too, and is gone 3 s later whatever still
runs in it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from distributedtorch.core import where
from distributedtorch.core.errors import DesyncError, DistributedTorchError, LaunchError, PeerError, shown, tell, unread
from distributedtorch.core.world import here
from distributedtorch.launch import private
from distributedtorch.launch.place import Place

NEWS = "news"
"""Name of the fifo on which ranks speak to the supervisor: lines `joined <rank>`, `raised <rank>`, `say <text>`."""

SUPERVISOR = "DISTRIBUTEDTORCH_SUPERVISOR"
"""The process that a rank is a child of; those that the rank itself starts find the same in their environment."""

_SECONDS_TO_LEAVE = 3.0
_MAX_LINES = 30
_MAX_BYTES = 1 << 20
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket closed",
    "Broken pipe",
    "Connection was likely closed",
)
"""How torch words that another process is gone (gloo and the store), where no part has made it a PeerError."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How one rank ended."""

    rank: int
    kind: Literal["raised", "exit", "ended"]
    """An error reached the top; `sys.exit` with a code; or the script came to its end."""
    type: str = ""
    """Name of the error's class."""
    message: str = ""
    """The error's text."""
    traceback: str = ""
    """The last lines of its traceback, without the error itself."""
    shown: bool = False
    """Whether it was shown on the user's terminal."""
    where: str = ""
    """The innermost line of the user's own code."""
    step: int = 0
    """The last step this rank noted."""
    code: int | None = None
    """Exit code, where the rank knew it."""
    time: float = 0.0
    """Monotonic, so comparable between the processes of one host."""
    consequence: bool = False
    """Whether another rank's end caused it."""
    peer: int | None = None
    """Which rank, where that is known."""
    missing: int | None = None
    """The rank that did not come, where this one ended because it had waited for too long."""


class _Rank:
    """What this process remembers for its record."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.logs: Callable[[], Path | None] | None = None
        self.name = ""
        self.pid = 0
        self.step = 0
        self.seen: memoryview | None = None
        self.news: tuple[int, os.stat_result] | None = None
        """The fifo, and how to tell that this descriptor still is it."""
        self.own = False
        """Whether this process is the rank, and not one that the rank has started."""
        self.written = False
        self.failed = False
        self.reached = False
        """Whether this rank has come to where the ranks meet."""
        self.exit: tuple[int, str] | None = None


_here = _Rank()


def note(step: int) -> None:
    """Remember the step this rank is at; kept where the supervisor finds it even after kill -9."""
    _here.step = step
    if _here.seen is not None:
        _here.seen[0] = step


def has_stepped() -> bool:
    """Whether this process has come to the end of an optimizer step."""
    return _here.step > 0


def failed() -> bool:
    """Whether an error has reached the top of this process."""
    return _here.failed or getattr(sys, "last_value", None) is not None


def install(place: Place, logs: Callable[[], Path | None] | None = None) -> None:
    """Have this process leave its record when it ends, or its words where nobody collects records. Once is enough."""
    if _here.place is not None or place.launcher == "none":
        return
    _here.place, _here.pid = place, os.getpid()
    _here.logs = logs
    atexit.register(_flush)  # first, so that it runs last
    if place.launcher == "torchrun":
        sys.excepthook = _hook_alone(sys.excepthook, place)
        return
    if place.run_folder is None:
        sys.excepthook = _hook_alone(sys.excepthook, place)
        sys.exit = _exit(sys.exit)
        atexit.register(_say_exit, place)
        return
    if os.environ.get(SUPERVISOR, str(os.getppid())) == str(os.getppid()):
        _be_the_rank(place, place.run_folder)
    sys.excepthook = _hook(sys.excepthook, place.rank)
    sys.exit = _exit(sys.exit)
    atexit.register(_at_exit)


def _be_the_rank(place: Place, folder: Path) -> None:
    """Speak for the rank from now on."""
    _here.own = True
    with contextlib.suppress(OSError):
        _here.seen = _shared_step(folder / f"step.{place.rank}")
    with contextlib.suppress(OSError):
        fifo = os.open(folder / NEWS, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        _here.news = fifo, os.fstat(fifo)


def before_others() -> None:
    """At exit, leave the record before what was registered so far is undone: peers notice that, and look for it."""
    if _here.place is not None and _here.place.run_folder is not None:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def joined(place: Place) -> None:
    """Tell the supervisor that this rank's script does take part."""
    if place.run_folder is not None:
        if not _here.own:  # the script has started its training as a process of its own
            _be_the_rank(place, place.run_folder)
        _news(f"joined {place.rank}")
        _leave(place.run_folder / f"joined.{place.rank}", "")


def reached() -> None:
    """Remember that this rank has come to where the ranks meet, and may wait there for others."""
    _here.reached = True


def has_reached() -> bool:
    """Whether it has."""
    return _here.reached


def comes(place: Place) -> None:
    """Tell the other ranks of this host that this one waits for them now."""
    if place.run_folder is not None:
        _leave(place.run_folder / f"came.{place.rank}", "")


def has_come(folder: Path, rank: int) -> bool:
    """Whether a rank waits for the others, or has."""
    return any((folder / f"{word}.{rank}").exists() for word in ("joined", "came"))


def serves(number: int) -> None:
    """This process only serves from now on: it is spoken of as that server."""
    place = _here.place
    if place is not None:
        _here.name = f"server {number} (process {place.rank})"
        if place.run_folder is not None:
            _leave(place.run_folder / f"server.{place.rank}", str(number))


def is_server(folder: Path, rank: int) -> bool:
    """Whether a process has come to serve."""
    return (folder / f"server.{rank}").exists()


def name_of(folder: Path, rank: int) -> str:
    """How a process is spoken of: by its rank, or as the server that it is."""
    try:
        return f"server {int((folder / f'server.{rank}').read_text())} (process {rank})"
    except (OSError, ValueError):
        return f"rank {rank}"


def say(text: str) -> None:
    """Print one line where the user looks: through the supervisor where there is one, else on stderr."""
    if not _news(f"say {text}"):
        tell(f"dtorch: {text}")


def fail(text: str, *, missing: int | None = None) -> NoReturn:
    """End this rank at once because ranks disagree, or one does not come (`missing`); from any thread.

    Printed here only without a supervisor.
    """
    trace = where.stack_of_main_thread()
    said = {"type": DesyncError.__name__, "message": text, "traceback": trace, "where": where.of_main_thread()}
    _write("raised", **said, code=1, missing=missing)
    if not _news(f"raised {_here.place.rank if _here.place else 0}") and not _was_said(text):
        tell(f"dtorch: {DesyncError.__name__}: {text}")
    os._exit(1)


def read(folder: Path, rank: int) -> End | None:
    """The record a rank left, or None where it left none that can be read."""
    try:
        with (folder / f"end.{rank}.json").open("rb") as file:
            return End(**json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def step_of(folder: Path, rank: int) -> int | None:
    """The last step a rank noted, however it ended; None where it noted none."""
    try:
        return int.from_bytes((folder / f"step.{rank}").read_bytes()[:8], sys.byteorder, signed=True)
    except OSError:
        return None


def is_consequence(error: BaseException) -> bool:
    """Whether the chain of errors that led to `error` began with another rank's end."""
    chain = _chain(error)
    explained = {id(e.__cause__) for e in chain if isinstance(e, PeerError)}
    first = next(e for e in chain if id(e) not in explained)
    return _is_lost(first)


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, PeerError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def _chain(error: BaseException) -> list[BaseException]:
    """The errors that led to this one, oldest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain[::-1]


def _culprit(error: BaseException) -> BaseException:
    """The error to name: this one, unless it is a lost peer met while handling an error of the user's own."""
    if is_consequence(error) or not _is_lost(error):
        return error
    return next(e for e in _chain(error)[::-1] if not _is_lost(e))


def _hook(previous: Callable[..., Any], rank: int) -> Callable[..., None]:
    """An excepthook that writes the record first.

    On the terminal of rank 0 a mere consequence is one line, so that the first cause stands out; its traceback is in
    the record. A Ctrl-C is shown by rank 0 alone. An error of the library is shown with the user's frames only.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        consequence = is_consequence(error)
        raised(error, shown=rank == 0 and not consequence)
        if rank == 0 and consequence:
            line = where.of_traceback(trace)
            tell(f"rank 0 ended because another rank did: {kind.__name__} at {line}")
        elif rank == 0 or not issubclass(kind, KeyboardInterrupt):
            previous(kind, error.with_traceback(_users(error)), error.__traceback__)

    return hook


def _hook_alone(previous: Callable[..., Any], place: Place) -> Callable[..., None]:
    """An excepthook for a rank without a supervisor: who failed and where, then the way out.

    Torchrun says who failed, and ends the others, by itself.
    """
    names = place.launcher != "torchrun"

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _here.failed = True
        _note_rows(error)
        named, at = _named(place), f"at {where.of_traceback(trace)} (step {_here.step})"
        if is_consequence(error):
            tell(f"distributedtorch: {named} ended because another rank did: {shown(f'{kind.__name__}: {error} {at}')}")
        elif _was_said(f"{kind.__name__}: {error}"):
            tell(f"distributedtorch: {named} failed {at} too: the same {kind.__name__}")
        else:
            if names:
                tell(f"distributedtorch: {named} failed {at}")
            previous(kind, error.with_traceback(_users(error)), error.__traceback__)
        if not names:
            return
        late = threading.Timer(_SECONDS_TO_LEAVE, os._exit, (1,))  # a thread that lingers must not keep all others
        late.daemon = True
        late.start()

    return hook


def _was_said(text: str) -> bool:
    """Whether a rank of this host, started by the same process, has printed the same error; from now on one has."""
    with contextlib.suppress(OSError, LaunchError):
        folder = None if _here.logs is None else _here.logs()
        if folder is None:
            return False
        private.folder(folder)
        mine = f"said.{os.getppid()}."
        for old in folder.glob("said.*"):
            if not old.name.startswith(mine):
                old.unlink(missing_ok=True)
        try:
            os.close(private.create(folder / f"{mine}{zlib.crc32(text.encode()):08x}", os.O_WRONLY))
        except FileExistsError:
            return True
    return False


def _say_exit(place: Place) -> None:
    code, line = _here.exit or (0, "")
    if code and not _here.failed and os.getpid() == _here.pid:
        tell(f"distributedtorch: {_named(place)} ends with code {code} at {line}")


def _named(place: Place) -> str:
    return f"{_here.name or f'rank {place.rank} of {place.world}'} on {socket.gethostname()}"


def raised(error: BaseException, *, shown: bool = False) -> None:
    """An error has come to the top of this rank: write the record and tell the supervisor."""
    _here.failed = True
    culprit = _culprit(error)
    _note_rows(culprit)
    _write(
        "raised",
        type=type(culprit).__name__,
        message="\n".join([str(culprit), *getattr(culprit, "__notes__", [])]),
        traceback="".join(traceback.format_tb(_users(culprit))),
        shown=shown and culprit is error,
        where=where.of_traceback(culprit.__traceback__),
        code=1,
        consequence=is_consequence(error),
        peer=next((e.rank for e in _chain(error) if isinstance(e, PeerError)), None),
    )
    if _here.place is not None and os.getpid() == _here.pid:
        _news(f"raised {_here.place.rank}")


def _users(error: BaseException) -> TracebackType | None:
    """The traceback to show: an error of the library ends in the user's own line."""
    trace = error.__traceback__
    return where.users_frames(trace) if isinstance(error, DistributedTorchError) else trace


def _note_rows(error: BaseException) -> None:
    """Say with an error of the user's own where the rank had one row or none: a lone row has shapes of its own."""
    rows = here().loop.rows
    if rows is None or rows.mine > 1 or rows.everywhere < 2 or not isinstance(error, Exception):
        return
    if not isinstance(error, DistributedTorchError):
        had = "1" if rows.mine else "none (another stands in)"
        error.add_note(
            f"this rank had {had} of the {rows.everywhere:g} rows of the present batch: x.squeeze() takes the "
            "dimension of a lone row away too; name the one to drop, x.squeeze(-1)"
        )


def _exit(previous: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """`sys.exit` that remembers its code and caller: neither can be learned at exit."""

    def exit(code: object = None, /) -> NoReturn:
        number = 0 if code is None else code if isinstance(code, int) else 1
        _here.exit = (number & 0xFF, where.of_frame(sys._getframe(1)))
        previous(code)

    return exit


def _flush() -> None:
    """At exit: where nobody reads what this rank has printed any more, that is no failure of the run."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                with unread(stream):
                    stream.flush()


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not _here.written:
        raised(error, shown=_here.place is not None and _here.place.rank == 0)  # another excepthook is in place of ours
    code, line = _here.exit or (0, "")
    _write("exit" if code else "ended", code=code, where=line)


def _write(kind: Literal["raised", "exit", "ended"], **fields: Any) -> None:
    """Write this rank's record, once; forked children write none, and a full disk must not hide the error."""
    place = _here.place
    if place is None or place.run_folder is None or _here.written or os.getpid() != _here.pid or not _here.own:
        return
    _here.written = True
    fields["traceback"] = "".join(str(fields.get("traceback", "")).splitlines(keepends=True)[-_MAX_LINES:])
    fields["message"] = str(fields.get("message", ""))[:4000]
    end = End(rank=place.rank, kind=kind, step=_here.step, time=time.monotonic(), **fields)
    _leave(place.run_folder / f"end.{place.rank}.json", json.dumps(asdict(end)))


def _leave(path: Path, text: str) -> None:
    """Put a file into the run folder, whole or not at all; somebody may have cleared that away meanwhile."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(private.create(temporary, os.O_WRONLY), "w") as file:
            file.write(text)
        temporary.replace(path)


def _news(line: str) -> bool:
    """Speak to the supervisor without ever waiting for it; False where none listens."""
    if _here.news is None:
        return False
    fifo, known = _here.news
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fifo), known):  # a script may close what it does not know
            return os.write(fifo, line.replace("\n", " ").encode()[:2000] + b"\n") > 0
    return False


def _shared_step(path: Path) -> memoryview:
    """Eight bytes of a file, mapped: a store to memory is all that a step costs."""
    descriptor = private.create(path, os.O_RDWR, new=False)
    try:
        os.ftruncate(descriptor, 8)
        return memoryview(mmap.mmap(descriptor, 8)).cast("q")
    finally:
        os.close(descriptor)
