"""Ranks without a command to repeat: the present process, forked, for notebooks and interactive Python.

Each rank is a copy of the caller with everything in it (the function is never pickled), leads a session of its own and
dies with the caller. Rank 0's output goes to the caller's `sys.stdout` and `sys.stderr`, the others' to the run folder.
The caller supervises as `dtorch run` does. A fork copies one thread only, and OpenMP's pool of them is lost: every rank
computes on one thread.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import ctypes
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from distributedtorch.core import plain
from distributedtorch.core.errors import LaunchError, RankError, explain, shown
from distributedtorch.launch import folder as folders
from distributedtorch.launch import place, private, record, reserve, start, verdict
from distributedtorch.launch import port as ports
from distributedtorch.launch import ranks as processes
from distributedtorch.launch.ranks import Rank
from distributedtorch.launch.supervise import Job, run_folder, supervised, tidy

_VALUE = "value.safetensors"
_NOT_PLAIN = "value.not-plain"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every rank does."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    folder: Path
    """The run folder: records, logs, the value."""


def launch(function: Callable[..., Any], args: tuple[Any, ...], *, workers: int, plan: str | None) -> Any:
    """Run `function(*args)` in `workers` forked ranks, and give rank 0's value.

    Raises:
        LaunchError: Nothing was started.
        RankError: A rank failed; the others were ended.
    """
    refuse(workers)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(ports.reserve(None))
        folder = run_folder()
        more = {"DISTRIBUTEDTORCH_WORKERS_SOURCE": "dt.launch"}
        more[folders.VARIABLE] = str(stack.enter_context(folders.meeting()))
        task = Task(function=function, args=args, folder=folder)
        echoes = [stack.enter_context(_Echo(stream)) for stream in (sys.stdout, sys.stderr)]
        with supervised(folder) as job:
            for echo in echoes:
                echo.listen(job.selector)
            for rank in range(workers):
                environ = processes.environment(rank, workers, reserved.getsockname()[1], folder, plan)
                job.add(_fork(rank, environ | more, task, echoes, reserved))
            job.wait()
        for echo in echoes:
            echo.drain()
    return _conclude(job)


def refuse(workers: int) -> None:
    """Say why this process cannot be forked into ranks, if it cannot."""
    here = place.find()
    script = "put it into a script and start that by dtorch run"
    faults = [
        (workers < 1, f"workers={workers}", "1 or more", "give the number of processes to start"),
        (not sys.platform.startswith("linux"), f"dt.launch on {sys.platform}", "Linux: it forks", "run one process"),
        (
            here.launcher != "none" or multiprocessing.parent_process() is not None,
            f"dt.launch in rank {here.rank} of {here.world} ({here.launcher}), or in a child process",
            "a process that is no rank yet",
            "call the function itself: the ranks are there already",
        ),
        (
            torch.cuda.is_initialized(),
            "dt.launch after CUDA was initialised in this process",
            "a process that has not used the GPU: CUDA cannot be forked",
            f"restart the kernel and move all use of the GPU into the function, or {script}",
        ),
        (
            dist.is_initialized(),
            "dt.launch after torch.distributed.init_process_group",
            "a process without a group",
            "restart the kernel and leave init_process_group out",
        ),
        (
            threading.current_thread() is not threading.main_thread(),
            "dt.launch in a thread",
            "the main thread: ranks end with the thread that forked them",
            f"call it in the main thread, or {script}",
        ),
    ]
    for wrong, given, needed, do in faults:
        if wrong:
            raise LaunchError(explain(given, needed, do))
    if torch.backends.cuda.is_built() and _is_cuda_lost():
        given = "dt.launch after torch.cuda.is_available() or the like, which already opens CUDA's driver"
        do = "restart the kernel and ask inside the function, or set PYTORCH_NVML_BASED_CUDA_CHECK=1 before that"
        raise LaunchError(explain(given, "a process that has not used the GPU: CUDA cannot be forked", do))


def _is_cuda_lost() -> bool:
    """Whether CUDA would refuse to work in a forked process: only a forked process can tell."""
    with _quiet_fork():
        pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python warns of threads that a fork leaves behind; what that costs is dealt with in `_become`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield


class _Forked:
    """A forked process as `Rank` wants one."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def wait(self) -> None:
        self.process.join()
        self.process.close()


def _fork(rank: int, environ: Mapping[str, str], task: Task, echoes: list[_Echo], reserved: socket.socket) -> Rank:
    def target() -> None:
        _become(environ, echoes if rank == 0 else [], task.folder / f"rank{rank}.log", reserved)
        _work(task)

    process = multiprocessing.get_context("fork").Process(target=target, name=f"rank {rank}")
    with _quiet_fork():
        process.start()
    forked = _Forked(process)
    log = task.folder / f"rank{rank}.log" if rank else None
    return Rank(rank, forked, os.pidfd_open(forked.pid), log)


def _become(environ: Mapping[str, str], echoes: list[_Echo], log: Path, reserved: socket.socket) -> None:
    """In the child: be a rank as if `dtorch run` had started it, with nothing of the caller's still to be done."""
    caller = os.getppid()
    os.setsid()
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != caller:
        os._exit(1)
    atexit._clear()
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # of an earlier cell: not this rank's error
        sys.__dict__.pop(name, None)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    reserved.close()
    targets = [echo.mouth for echo in echoes] or [private.create(log, os.O_WRONLY | os.O_APPEND)] * 2
    os.dup2(targets[0], 1)
    os.dup2(targets[1], 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.update(environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "DISTRIBUTEDTORCH_THREADS": "forked"}
    torch.set_num_threads(1)


def _work(task: Task) -> NoReturn:
    """In the child: the function, its value, the record of its end."""
    code = 1
    try:
        here = start.prepare()
        start.join_world()
        value = task.function(*task.args)
        if here.rank == 0:
            _leave_value(task.folder, value)
        code = 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        reserve.remark(error)
        trace = error.__traceback__  # begins in this function
        record.raised(error.with_traceback(trace.tb_next or trace if trace else None))
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _leave_value(folder: Path, value: Any) -> None:
    try:
        plain.write(folder / _VALUE, value)
    except Exception as error:  # a finished run is not lost because its value cannot be written
        (folder / _VALUE).unlink(missing_ok=True)
        (folder / _NOT_PLAIN).write_text(str(error) if type(error) is TypeError else f"{type(error).__name__}: {error}")


def _conclude(job: Job) -> Any:
    """The value of rank 0, or the first cause as an error."""
    if job.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if job.signal is not None:
        os.kill(os.getpid(), job.signal)
    if job.failed:
        found = verdict.judge(job.ranks, job.folder)
        end = record.read(job.folder, found.rank)
        trace = f"Traceback (most recent call last):\n{end.traceback}" if end is not None and end.traceback else ""
        advice = found.advice if end is None else found.advice or verdict.advice(end)
        more = trace + "".join(f"  {line}\n" for line in advice.splitlines())
        text = f"{record.name_of(job.folder, found.rank)} failed first: {found.text}\n{more}  logs: {job.folder}"
        raise RankError(shown(text), rank=found.rank, kind=end.type if end is not None else "")
    value = None
    if (job.folder / _NOT_PLAIN).exists():
        what = (job.folder / _NOT_PLAIN).read_text()
        print(
            f"distributedtorch: rank 0 returned {what}, which is not plain data, so dt.launch returns None: "
            "return numbers, text, tensors (model.state_dict()), or lists and dicts of these",
            file=sys.stderr,
        )
    elif (job.folder / _VALUE).exists():
        value = plain.read(job.folder / _VALUE)
        (job.folder / _VALUE).unlink()
    tidy(job)
    return value


class _Echo:
    """A pipe from rank 0 to a stream of the caller's, whatever that stream is (a notebook's is no file)."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ear, self.mouth = os.pipe()
        os.set_blocking(self.ear, False)

    def __enter__(self) -> _Echo:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.ear)
        os.close(self.mouth)

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Hand on what comes, while the selector is asked."""
        selector.register(self.ear, selectors.EVENT_READ, self._hear)

    def drain(self) -> None:
        """Hand on what is still in the pipe."""
        while self._hear():
            pass

    def _hear(self) -> bool:
        try:
            text = self.decoder.decode(os.read(self.ear, 65536))
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()
        return True
