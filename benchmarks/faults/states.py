"""States in which everything follows from one number, so that a mixture of two saves shows; and worlds to save them in.

After `v` steps every parameter is v(v+1)/2 and every momentum -v, exactly; the step, and the user's own state in
checkpoint.json, are v.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import distributedtorch as dt
from distributedtorch.checkpoint import index, place
from distributedtorch.checkpoint.index import Reader
from distributedtorch.checkpoint.place import INDEX, Local, Place

PLANS = ("ddp", "zero1", "zero2", "zero3")
_DEATH_SIGNAL, _SUBREAPER = 1, 36


class Cell(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Counted:
    """The user's own state: how many steps were taken."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """A training whose state is known at every step."""

    def __init__(self, plan: str, size: int = 4000) -> None:
        net = nn.Sequential(*(Cell(size + k) for k in range(3)))
        sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=1.0)
        self.model, self.optimizer = dt.distribute(net, sgd, plan=plan)
        self.counted = Counted()
        self.state = {"counted": self.counted}

    def step(self) -> int:
        self.optimizer.zero_grad()
        (-self.model(torch.zeros((), dtype=torch.float64))).backward()
        self.optimizer.step()
        self.counted.value += 1  # not before the forward, at which save_every acts where no loader was given
        return self.counted.value


class Mixture(Exception):
    """A checkpoint that verifies, and is of more than one save."""


def value_in(there: Place, name: str) -> int:
    """The number that all of a checkpoint follows from, read and checked as a reader would."""
    found = index.read(there, name)
    reader = Reader(there, name, found)
    reader.check(0, 1)
    value = int(found.content["step"])
    if found.content["run"]["user"]["counted"]["value"] != value:
        raise Mixture(f"{name}: step {value}, user {found.content['run']['user']}")
    for key in found.tensors:
        if key.startswith("random/"):
            continue
        due = -value if key.endswith("momentum_buffer") else value * (value + 1) / 2
        if not bool((reader.whole(key) == due).all()):
            raise Mixture(f"{name}: {key} is not of step {value}")
    return value


def looked_at(root: Path) -> tuple[list[int], list[str]]:
    """The values of all that look committed, the newest first, and what is wrong with them.

    Stricter than `dt.load`, which would take an earlier one: after a kill, whatever has a checkpoint.json is whole.
    """
    there = place.of(root)
    values, wrong = [], []
    for name in there.committed():
        if INDEX in there.files(name):
            try:
                values.append(value_in(there, name))
            except (dt.CheckpointError, Mixture) as error:
                wrong.append(f"{name}: {error}")
    return values, wrong


def leftovers(root: Path) -> list[str]:
    there = place.of(root)
    return there.unfinished() + [name for name in there.entries() if name.startswith(".") and name != ".lock"]


def warm() -> None:
    """Import now what a rank would import, once for all forks."""
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=1.0, momentum=1.0).step()
    import distributedtorch.distribute  # noqa: F401

    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what a killed supervisor leaves is ours to wait for


class World:
    """Ranks of a forked supervisor, which tell what they do in lines of text through one pipe."""

    def __init__(self, folder: Path, workers: int, function: Callable[..., None], *args: Any) -> None:
        self.workers, self.log = workers, folder / "log"
        self.ear, mouth = os.pipe()
        self._text = ""
        self.told: list[list[str]] = []
        self.pids: dict[int, int] = {}
        self.supervisor = os.fork()
        if self.supervisor == 0:
            os.close(self.ear)
            self._be(folder, mouth, function, args)
        os.close(mouth)

    def _be(self, folder: Path, mouth: int, function: Callable[..., None], args: tuple[Any, ...]) -> NoReturn:
        try:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            os.chdir(folder)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

            def told(*args: Any) -> None:
                Tell(mouth)("rank", dt.rank(), os.getpid())
                function(Tell(mouth), *args)

            dt.launch(told, *args, workers=self.workers)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def hear(self, until: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Listen until a condition holds; False where all ranks ended before it did, or time has passed."""
        deadline = time.monotonic() + seconds
        while not until():
            if not select.select([self.ear], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            got = os.read(self.ear, 65536).decode()
            if not got:
                return until()
            *lines, self._text = (self._text + got).split("\n")
            for line in lines:
                self.told.append(line.split(" ", 2))
                if self.told[-1][0] == "rank":
                    self.pids[int(self.told[-1][1])] = int(self.told[-1][2])
        return True

    def values(self, word: str) -> list[int]:
        return [int(line[1]) for line in self.told if line[0] == word]

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Return when every process of it is gone and all that it told is heard."""
        self.kill([*self.pids.values(), self.supervisor])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self.hear(lambda: False)
        os.close(self.ear)

    def said(self) -> str:
        return self.log.read_text()[-2000:] if self.log.exists() else ""


class Tell:
    """A rank's end of the pipe."""

    def __init__(self, mouth: int) -> None:
        self.mouth = mouth

    def __call__(self, *words: object) -> None:
        os.write(self.mouth, (" ".join(str(word) for word in words).replace("\n", " ")[:4000] + "\n").encode())


class Memory(Place):
    """Checkpoints held in memory, to be read only."""

    def __init__(self, folders: dict[str, dict[str, bytearray]]) -> None:
        self.said, self.folders = "memory", folders

    def entries(self) -> list[str]:
        return list(self.folders)

    def files(self, folder: str) -> dict[str, int]:
        return {name: len(content) for name, content in self.folders[folder].items()}

    def opened(self, folder: str, name: str) -> tuple[int, Callable[[int, memoryview], int]]:
        if name not in self.folders[folder]:
            raise FileNotFoundError(name)
        content = self.folders[folder][name]

        def read(offset: int, out: memoryview) -> int:
            piece = memoryview(content)[offset : offset + len(out)]
            out[: len(piece)] = piece
            return len(piece)

        return len(content), read


Memory.__abstractmethods__ = frozenset()  # what is left is for writers


def held(root: Path) -> Memory:
    """A folder of checkpoints, read into memory."""
    there = place.of(root)
    return Memory({n: {f: bytearray((root / n / f).read_bytes()) for f in there.files(n)} for n in there.committed()})


def write_in_place() -> None:
    """Sabotage: every save goes over the files of the newest checkpoint."""

    def begin(self: Local, name: str, bytes_needed: int) -> str:
        target = next(iter(self.committed()), name)
        (self.root / target).mkdir(mode=0o700, exist_ok=True)
        return target

    @contextlib.contextmanager
    def writing(self: Local, folder: str, name: str, *, private: bool) -> Iterator[Callable[..., Any]]:
        handle = os.open(self.root / folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        yield lambda content: os.write(handle, content)
        os.fsync(handle)
        os.close(handle)

    Local.begin, Local.writing = begin, writing  # type: ignore[method-assign]
    Local.commit = lambda *_: None  # type: ignore[method-assign]


class Equal(str):
    """Sabotage: a hash that is never another."""

    def __ne__(self, other: object) -> bool:
        return False


class NoHash:
    """Sabotage: stands for `hashlib` where blocks are checked."""

    @staticmethod
    def sha256(_: object = b"") -> Any:
        return type("Hash", (), {"hexdigest": lambda _: Equal("0" * 64)})()
