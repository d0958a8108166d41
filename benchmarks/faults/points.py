"""C2: kill -9 before, after and in the middle of every system call of a save; never fewer than one good checkpoint.

The process kills itself: alone (every call, many times, with 0 to 3 earlier checkpoints), and as either rank of two.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import Tell, World
from distributedtorch.checkpoint import place
from distributedtorch.checkpoint.place import Local
from tests.checkpoint.files import newest, value_in, write

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir", "truncate", "pwrite", "chmod")
_VALUE = 7.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)


class Points:
    """The system calls of this process on files under a folder, by name; at one of them it kills itself."""

    def __init__(self, root: Path, kill_at: int, when: str, tell: Callable[[str], None] | None = None) -> None:
        self.root, self.kill_at, self.when, self.tell = root, kill_at, when, tell
        self.names: list[str] = []
        self.opened: dict[int, str] = {}
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        fcntl.lockf = self._counted("lockf", fcntl.lockf)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            what = self._what(name, args[0], how.get("dir_fd"))
            if what is None:
                return real(*args, **how)
            self.names.append(f"{name} {what}")
            mine = len(self.names) - 1 == self.kill_at
            if mine and self.when == "before":
                self._die()
            if mine and self.when == "amid" and name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
                self._die()
            try:
                result = real(*args, **how)
            finally:  # a folder that is there already is an error like any other
                if mine and self.when == "after":
                    self._die()
            if name == "open":
                self.opened[result] = what
            return result

        return call

    def _die(self) -> None:
        if self.tell is not None:
            self.tell("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def _what(self, name: str, target: Any, folder: int | None) -> str | None:
        """What a call is about, in words that are the same every time; None where it is not ours."""
        if isinstance(target, int):
            return self.opened.pop(target, None) if name == "close" else self.opened.get(target)
        path = os.fspath(target)
        if folder is not None:
            return f"{self.opened[folder]}/{path}" if folder in self.opened else None
        if not str(path).startswith(str(self.root)):
            return None
        said = str(path)[len(str(self.root)) :].lstrip("/") or "folder"
        return re.sub(r"\d{6}-step-\d+", "checkpoint", re.sub(r"\.draft-[0-9a-f]+", "draft", said))


def alone(root: Path, size: int, keep: int, kill_at: int, when: str) -> tuple[bool, list[str]]:
    """Save in a child that kills itself. The result: whether it lived to the end; the names of its calls."""
    ear, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            place._locks.clear()
            points = Points(root, kill_at, when)
            write(root, _VALUE, size, keep)
            os.write(mouth, "\n".join(points.names).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(mouth)
    with open(ear, "rb") as pipe:
        names = pipe.read().decode().split("\n")
    return os.waitpid(pid, 0)[1] == 0, names


def prepared(folder: Path, earlier: int) -> Path:
    """A folder with checkpoints 1.0, 2.0, ...; what is in it was written by a process that is gone."""
    root = folder / f"with-{earlier}"
    if not root.exists():
        for value in range(earlier):
            write(root, 1.0 + value, keep=9)
    return root


def judged(root: Path, earlier: int) -> list[str]:
    """What is wrong after a kill."""
    there, wrong = place.of(root), []
    if newest(root) not in ((float(earlier) or None), _VALUE):
        wrong.append(f"newest is {newest(root)} after {earlier} earlier ones")
    for name in there.committed():
        try:
            if place.INDEX in there.files(name):
                value_in(root, name)
        except dt.CheckpointError as error:
            wrong.append(str(error))
    write(root, 8.0)
    for _, handle in place._locks.values():
        os.close(handle)
    place._locks.clear()
    if newest(root) != 8.0 or states.leftovers(root) or len(there.committed()) > 2:
        wrong.append(f"the next writer leaves {sorted(there.entries())}")
    return wrong


def by_one(times: int, seed: int, folder: Path, tried: Counter[str]) -> list[str]:
    draw, failures = random.Random(seed), []
    for number in range(times):
        earlier, size, keep = number % 4, draw.randrange(1, 20_000), draw.randint(1, 3)
        source, root = prepared(folder, earlier), folder / "c"
        _, names = _at(root, source, (size, keep), -1, "")
        for point, name in enumerate(names):
            for when in ("before", "after", "amid") if name.startswith("write") else ("before", "after"):
                lived, _ = _at(root, source, (size, keep), point, when)
                tried[f"{when} {name}"] += 1
                wrong = judged(root, earlier) + (["it was not killed"] if lived else [])
                failures += [f"{when} {name}: {one}" for one in wrong]
    return failures


def _at(root: Path, source: Path, how: tuple[int, int], point: int, when: str) -> tuple[bool, list[str]]:
    shutil.rmtree(root, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, root)
    return alone(root, *how, point, when)


def together(tell: Tell, path: str, plan: str, victim: int, point: tuple[int, str]) -> None:
    """One rank of two, which takes the third save or dies in it."""
    training = states.Training(plan)
    for _ in range(2):
        training.step()
        dt.save(path, state=training.state)
    training.step()
    if dt.rank() == victim:
        points = Points(Path(path), *point, tell)
    dt.save(path, state=training.state)
    if dt.rank() == victim:
        tell("lived", "; ".join(points.names))


def by_two(seed: int, folder: Path, tried: Counter[str]) -> list[str]:
    draw, failures = random.Random(seed), []
    for victim in (0, 1):
        point, lived = 0, False
        while not lived:
            root, when = folder / "w", draw.choice(("before", "after"))
            world = World(folder, 2, together, str(root), draw.choice(states.PLANS), victim, (point, when))
            world.hear(lambda: any(line[0] in ("lived", "dies") for line in world.told))  # noqa: B023
            time.sleep(draw.random() * 0.1)  # the other rank goes on for a moment
            world.end()
            lived = any(line[0] == "lived" for line in world.told)
            values, wrong = states.looked_at(root)
            if not values or values[0] not in (2, 3) or (lived and values[0] != 3):
                wrong.append(f"values {values}: {world.said()}")
            failures += [f"rank {victim} of 2 {when} call {point}: {one}" for one in wrong]
            tried[f"rank {victim} of 2"] += not lived
            shutil.rmtree(root)
            point += 1
    return failures


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    states.warm()
    tried: Counter[str] = Counter()
    twin: Counter[str] = Counter()
    wrong = by_one(given.times, given.seed, folder, tried) + by_two(given.seed, folder, tried)
    shutil.rmtree(folder / "c", ignore_errors=True)
    before = Local.begin, Local.writing, Local.commit
    states.write_in_place()
    noticed = len(by_one(4, given.seed, folder, twin))
    Local.begin, Local.writing, Local.commit = before  # type: ignore[method-assign]
    return {
        "trials": sum(tried.values()),
        "failed": len(wrong),
        "times": given.times,
        "points": dict(tried),
        "wrong": wrong[:20],
        "sabotaged": {"write in place": [noticed, sum(twin.values())]},
        "said": f"{len(tried)} points",
    }
