"""The supervisor: starts the ranks, makes the folder they meet in, ends all of them together and names the first cause.

It holds no model, takes part in no exchange and listens nowhere. When a rank fails, the others
have 1.5 s to end by themselves (they write their records), then SIGTERM, then SIGKILL at 3 s; on Ctrl-C, SIGTERM or
SIGHUP the ranks get the same signal and 2 s. Data workers go with their rank. If the supervisor itself is killed, the
kernel kills the ranks.

With `restarts` all ranks are started again after a failure, each time with a new folder to meet in. What outlives an
attempt is what checkpoints have, and the folder `kept` of the first one, where parameter servers keep what they have
applied.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from distributedtorch.core.errors import LaunchError, PlanError, UsageError, explain, tell
from distributedtorch.launch import folder as folders
from distributedtorch.launch import port as ports
from distributedtorch.launch import private, record, verdict
from distributedtorch.launch import ranks as processes
from distributedtorch.launch import script as scripts
from distributedtorch.launch.ranks import Rank

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END, _SECONDS_TO_KILL = 1.5, 3.0
_SECONDS_AFTER_SIGNAL = 2.0
_MISTAKES = tuple(f"{kind.__name__}:" for kind in (UsageError, PlanError))
"""Errors that would come again."""


def supervise(
    command: list[str],
    workers: int,
    *,
    plan: str | None,
    script: str | None,
    port: int | None = None,
    restarts: int = 0,
) -> int:
    """Run `command` in `workers` processes until all have ended, and return the exit code of the run.

    Args:
        command: What each rank executes, the interpreter first.
        workers: How many ranks to start.
        plan: Handed to the ranks as `DISTRIBUTEDTORCH_RUN_PLAN`; None leaves the environment as it is.
        script: The Python file the command runs, looked at before anything starts; None: not looked at.
        port: MASTER_PORT, for a process group of the script's own, on loopback; None takes a free one.
        restarts: How often all ranks are started again after one has failed.

    Raises:
        LaunchError: Nothing was started: too few workers, a script that cannot take part, a port in use.
    """
    _refuse_platform(workers)
    if workers < 1:
        raise LaunchError(explain(f"{workers} workers given", "at least 1", "give --workers a number from 1 up"))
    if restarts < 0:
        raise LaunchError(explain(f"{restarts} restarts given", "0 or more", "give --restarts a number from 0 up"))
    processes.hang_asked()  # refused here if it cannot be read
    _refuse_lost_folder()
    if script is not None:
        scripts.check(script, workers)
    _have_standard_streams()
    job = _attempt(command, workers, plan, port, Again(restarts=restarts))
    first, past = job.folder, _Past()
    try:
        for attempt in range(1, restarts + 1):
            found = past.worth_another(job)
            if found is None:
                break
            tell(verdict.headline(found, job.folder))
            tell(f"dtorch: starting again ({attempt} of {restarts})")
            job = _attempt(command, workers, plan, port, Again(restarts=restarts, attempt=attempt, first=first))
    finally:
        shutil.rmtree(first / processes.KEPT, ignore_errors=True)
    return _conclude(job, workers)


@dataclass(frozen=True, kw_only=True)
class Again:
    """Which start of all ranks it is."""

    restarts: int
    """How often they may be started again."""
    attempt: int = 0
    first: Path | None = None
    """The run folder of the first start; None: this is it."""

    def environment(self, folder: Path) -> dict[str, str]:
        """What ranks are told of it; nothing where there is one start only."""
        if not self.restarts:
            return {}
        kept = (self.first or folder) / processes.KEPT
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        hang = os.environ.get(processes.HANG_VARIABLE, processes.HANG_WITH_RESTARTS)
        return {
            processes.ATTEMPT_VARIABLE: str(self.attempt),
            processes.KEPT_VARIABLE: str(kept),
            processes.HANG_VARIABLE: hang,
        }


class _Past:
    """What earlier starts of all ranks have come to."""

    def __init__(self) -> None:
        self.took_part = False
        """Whether all ranks have joined, in any start: then their script can."""
        self.hung: set[int] = set()
        """The steps at which a rank did not come."""

    def worth_another(self, job: Job) -> verdict.Verdict | None:
        """The first cause of a start that failed, where another one may come further."""
        self.took_part = self.took_part or all(rank.joined for rank in job.ranks)
        if not self.took_part or not job.failed or job.signal is not None:
            return None
        found = verdict.judge(job.ranks, job.folder)
        if found.text.startswith(_MISTAKES):
            return None
        if found.hung_at in self.hung:
            tell(f"dtorch: a rank has not come at step {found.hung_at} for the second time: not started again")
            return None
        if found.hung_at is not None:
            self.hung.add(found.hung_at)
        return found


def _attempt(command: list[str], workers: int, plan: str | None, port: int | None, again: Again) -> Job:
    """One run of all ranks, from start to end."""
    with contextlib.ExitStack() as stack:
        number = stack.enter_context(ports.reserve(port)).getsockname()[1]
        folder = run_folder()
        more = {folders.VARIABLE: str(stack.enter_context(folders.meeting())), **again.environment(folder)}
        job = stack.enter_context(supervised(folder))
        for rank in range(workers):
            environ = {**processes.environment(rank, workers, number, folder, plan), **more}
            job.add(processes.start(rank, command, environ, folder))
        job.wait()
        for key, _ in job.selector.select(0):  # a signal to all may have come to the ranks first
            key.data()
    return job


class Job:
    """The ranks of one run, and what is to be done about them next."""

    def __init__(self, folder: Path, selector: selectors.BaseSelector) -> None:
        self.folder, self.selector = folder, selector
        self.ranks: list[Rank] = []
        self.failed = False
        self.unjoined: int | None = None
        self.signal: int | None = None
        self.listen: Callable[[], None] = lambda: None
        """Hears what ranks have said by now."""
        self._due: list[tuple[float, int]] = []

    def add(self, rank: Rank) -> None:
        self.ranks.append(rank)
        self.selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._ended(rank))

    def wait(self) -> None:
        """Return when every rank has ended."""
        while any(rank.status is None for rank in self.ranks):
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for key, _ in self.selector.select(timeout):
                key.data()
            while self._due and self._due[0][0] <= time.monotonic():
                self._send(self._due.pop(0)[1])

    def interrupt(self, number: int) -> None:
        """A signal to the supervisor: hand it on; a second one ends all at once."""
        if self.signal is not None:
            self._send(signal.SIGKILL)
            return
        self.signal = number
        self._send(number)
        self._due = [(time.monotonic() + _SECONDS_AFTER_SIGNAL, signal.SIGKILL)]

    def fail(self) -> None:
        """A rank has failed: the others have a moment, then they are ended."""
        self.failed = True
        if not self._due:
            now = time.monotonic()
            self._due = [(now + _SECONDS_TO_END, signal.SIGTERM), (now + _SECONDS_TO_KILL, signal.SIGKILL)]

    def hear(self, line: str) -> None:
        """One line from a rank."""
        word, _, text = line.partition(" ")
        if word == "say":
            tell(f"dtorch: {text}")
        elif word == "raised":
            self.fail()
        elif word == "joined":
            for rank in self.ranks:
                rank.joined = rank.joined or str(rank.number) == text

    def clear(self) -> None:
        for rank in self.ranks:
            rank.clear()

    def _ended(self, rank: Rank) -> None:
        if rank.look() is None:
            return
        rank.ended = time.monotonic()
        self.selector.unregister(rank.pidfd)
        self.listen()
        rank.joined = rank.joined or (self.folder / f"joined.{rank.number}").exists()  # where there are no fifos
        if rank.status == 0 and len(self.ranks) > 1 and not self.failed and not rank.joined:
            self.unjoined = rank.number
        if rank.status != 0 or self.unjoined is not None:
            self.fail()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            if rank.status is None:
                rank.send(number)


def _conclude(job: Job, workers: int) -> int:
    """Print what there is to say, tidy the run folder, and give the exit code."""
    if job.signal is not None:
        tell(f"dtorch: ended by {signal.Signals(job.signal).name}; logs: {job.folder}")
        return 128 + job.signal
    if job.unjoined is not None:
        tell(f"dtorch: {_unjoined(job, workers)}\n  logs: {job.folder}")
        return 2
    if job.failed:
        found = verdict.judge(job.ranks, job.folder)
        tell(verdict.headline(found, job.folder))
        return found.code
    tidy(job)
    return 0


def tidy(job: Job) -> None:
    """After a good end: remove the run folder where no rank has written anything into its log."""
    if not any(rank.log is not None and rank.log.exists() and rank.log.stat().st_size for rank in job.ranks):
        shutil.rmtree(job.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            job.folder.parent.rmdir()  # only where it is empty


def _unjoined(job: Job, workers: int) -> str:
    took_part = [rank.number for rank in job.ranks if rank.joined]
    if not took_part:
        return scripts.unjoined(workers)
    return explain(
        f"rank {job.unjoined} ended with code 0 before it called dt.distribute, which rank {took_part[0]} did",
        "the same call in every process",
        "move dt.distribute out of the branch that only some ranks take",
    )


def run_folder() -> Path:
    """`.dtorch/<UTC time>-<random>` under the working folder, or if need be the temporary one, for this user only."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    while True:
        folder = private.home() / f"{now}-{secrets.token_hex(4)}"
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileNotFoundError:  # a job that has just ended found its parent empty, and removed it
            continue
        except OSError as error:
            given = f"{folder.parent} cannot be written: {error.strerror}"
            raise LaunchError(explain(given, "a folder for logs", "start from a folder you may write to")) from None


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[Job]:
    """A job with ears for signals and for its ranks; whatever happens, nothing of it is left running."""
    with selectors.DefaultSelector() as selector:
        job = Job(folder, selector)
        with _waited_for(), _signals(selector, job.interrupt), _news(selector, job):
            try:
                yield job
            finally:
                job.clear()


@contextlib.contextmanager
def _waited_for() -> Iterator[None]:
    """Ends of children can be asked for, also where whoever started this process had them ignored."""
    before = signal.getsignal(signal.SIGCHLD)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector, act: Callable[[int], None]) -> Iterator[None]:
    """Signals as events of the selector. One that the starter of this process ignored (nohup) stays ignored."""
    ear, mouth = socket.socketpair()
    ear.setblocking(False)
    mouth.setblocking(False)
    before = {s: signal.getsignal(s) for s in _SIGNALS}
    handled = {s: handler for s, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)

    def hear() -> None:
        for number in ear.recv(64):
            if number in handled:
                act(number)

    selector.register(ear, selectors.EVENT_READ, hear)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handled.items():
            signal.signal(number, handler)
        ear.close()
        mouth.close()


@contextlib.contextmanager
def _news(selector: selectors.BaseSelector, job: Job) -> Iterator[None]:
    """The fifo on which ranks speak. A file system without fifos costs the news, not the run."""
    path = job.folder / record.NEWS
    try:
        os.mkfifo(path, 0o600)
        fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # for writing too, so that it never ends
    except OSError:
        yield
        return

    def listen() -> None:
        with contextlib.suppress(BlockingIOError):  # all was heard already
            for line in os.read(fifo, 65536).decode(errors="replace").splitlines():
                job.hear(line)

    job.listen = listen
    selector.register(fifo, selectors.EVENT_READ, listen)
    try:
        yield
    finally:
        os.close(fifo)
        path.unlink(missing_ok=True)


def _have_standard_streams() -> None:
    """Where a standard stream is closed, something else would get its number, and what ranks print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        os.set_inheritable(nowhere, True)
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)


def _refuse_platform(workers: int) -> None:
    if workers > 1 and not sys.platform.startswith("linux"):
        given = f"{workers} workers given on {sys.platform}"
        raise LaunchError(explain(given, "Linux for several processes", "run one process here, or start on Linux"))


def _refuse_lost_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        given = f"the working folder is gone ({error.strerror})"
        raise LaunchError(explain(given, "a folder to run in", "change into one that is there")) from None


def restart(workers: int) -> NoReturn:
    """Become the supervisor of the command this process was started with, run `workers` times.

    This process keeps its number, its terminal and its environment, and ends with the code of that run. What the script
    has made so far goes as at its end: output is flushed, functions registered at exit are called; data, threads, open
    files and the use of a GPU are gone.

    Raises:
        LaunchError: There is no command to repeat, or this is not the process to repeat it from.
    """
    _refuse_platform(workers)
    _refuse_unrepeatable(workers)
    _refuse_lost_folder()
    processes.restarts_asked(), processes.hang_asked()  # refused here if they cannot be read
    os.environ["DISTRIBUTEDTORCH_WORKERS_SOURCE"] = "call"
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    command = [sys.executable, *sys.orig_argv[1:]]
    _go_back()
    _let_go()
    os.execve(sys.executable, [sys.executable, "-P", "-c", _SUPERVISOR, paths, str(workers), *command], os.environ)


_SUPERVISOR = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.argv[0] = os.path.join(os.path.dirname(sys.executable), 'dtorch'); "
    "from distributedtorch.launch.supervise import again; again(int(sys.argv[2]), sys.argv[3:])"
)
"""What the starter becomes. By the first word of its arguments the package knows that it needs no torch."""


def _go_back() -> None:
    """Return to the folder this process was started in, where its command names the script from there."""
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    words = (word for word in sys.orig_argv[1:] if word and (word == file or file.endswith(os.sep + word)))
    began = file.removesuffix(next(words, file))
    if began and os.path.isdir(began):
        os.chdir(began)


def again(workers: int, command: list[str]) -> NoReturn:
    """In the program that the starter has become: run the job, and exit with its code."""
    try:
        code = supervise(command, workers, plan=None, script=None, restarts=processes.restarts_asked())
    except LaunchError as error:
        tell(f"dtorch: {error}")
        code = 2
    sys.exit(code)


def _let_go() -> None:
    """Do what is done when a script ends, as far as another program in this process would not do it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    ctypes.CDLL(None).fflush(None)
    signal.setitimer(signal.ITIMER_REAL, 0)  # the ranks set their own
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, descriptor <= 2)


def _refuse_unrepeatable(workers: int) -> None:
    """Say why the command cannot be repeated, if it cannot."""
    do = f"put the training into a function and call dt.launch(function, workers={workers}), or run it as a script"
    if _in_notebook() or sys.flags.interactive or not _has_command():
        given = f"workers={workers} given in an interactive Python, a notebook or a script read from stdin"
        raise LaunchError(explain(given, "a command that can be run again", do))
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        given = f"workers={workers} given in a child process or thread of the script"
        do = "call dt.distribute in the main process, below `if __name__ == '__main__':`"
        raise LaunchError(explain(given, "the main thread of the process that the command started", do))


def _has_command() -> bool:
    """Whether running `sys.orig_argv` again runs the same program."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return "-c" in sys.orig_argv[1:] if file is None else Path(file).exists()  # "<stdin>" does not


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and shell() is not None
