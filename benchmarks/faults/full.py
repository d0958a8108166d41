"""C6: the disk is full at a random byte of a save; two ranks hear why, train on, and leave nothing behind.

A small file system in memory, mounted in a namespace of this process's own (needs root), is filled up to a random rest.
The library's look at the free space is answered with plenty, as where another job takes it meanwhile; every fifth time
the answer is true.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import PLANS, Tell, World
from distributedtorch import behind as saves
from distributedtorch.checkpoint.place import Local
from distributedtorch.launch import record

_NEW_MOUNTS, _PRIVATE, _SIZE = 0x00020000, (1 << 18) | (1 << 14), 8 << 20
_PAGE = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offsets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)


def mount(folder: Path) -> Path:
    """A file system of 8 MiB that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare: run as root")
    libc.mount(b"none", b"/", None, _PRIVATE, None)
    small = folder / "small"
    small.mkdir()
    if libc.mount(b"tmpfs", str(small).encode(), b"tmpfs", 0, f"size={_SIZE}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount: run as root")
    return small


class Disk:
    """The small file system, which rank 0 fills."""

    def __init__(self, small: Path) -> None:
        self.ballast, self.free = small / "ballast", lambda: os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        self.honest = shutil.disk_usage

    def leave(self, rest: int, *, told: bool) -> None:
        """Fill it but for `rest` bytes, and say so where the library looks."""
        if dt.is_main():
            handle = os.open(self.ballast, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(handle, 0, max(1, self.free() - rest))
            os.close(handle)
        plenty = type("Usage", (), {"free": 1 << 60})
        shutil.disk_usage = self.honest if told else lambda _: plenty  # type: ignore[assignment,return-value]
        dt.barrier()

    def empty(self) -> None:
        dt.barrier()
        if dt.is_main():
            self.ballast.unlink()
        dt.barrier()


def rank(tell: Tell, path: str, plan: str, draws: tuple[list[int], int], sabotage: str) -> None:
    """One of two ranks: save onto a full disk, at once or behind training, again and again."""
    if sabotage == "draft is not dropped":
        Local.drop = lambda *_: None  # type: ignore[method-assign]
    if sabotage == "failure is not told":
        saves.tell = lambda: None
    said: list[str] = []
    record.say = said.append
    root, disk = Path(path), Disk(Path(path).parent)
    training = states.Training(plan, 20_000)
    training.step()
    dt.save(root, state=training.state, keep=1)
    there = states.place.of(root)
    needed = sum(-(-size // _PAGE) for size in there.files(there.committed()[0]).values())
    for number in draws[0]:
        draw = random.Random(f"{draws[1]}/{number}")
        before, told = training.step() - 1, number % 5 == 4
        rest = draw.randrange(needed - 1) * _PAGE
        disk.leave(rest, told=told)
        said.clear()
        behind = draw.random() < 0.5
        error, late = _attempt(training, root, said, behind=behind)
        disk.empty()
        values, wrong = states.looked_at(root) if dt.is_main() else ([before], [])
        wrong += [f"values {values}, {before} was saved"] if values != [before] else []
        words = ("bytes and", "are free") if told and "are free" in error else (path, "No space left")
        wrong += (
            [f"rest {rest} of {needed * _PAGE}, error {error!r}"] if not all(word in error for word in words) else []
        )
        wrong += [f"left {states.leftovers(root)}"] if dt.is_main() and states.leftovers(root) else []
        wrong += ["not told within one step"] if late else []
        dt.barrier()
        dt.save(root, state=training.state, keep=1)  # there is room again
        how = f"{'looked' if told else 'behind' if behind else 'wait'}"
        tell("row", dt.rank(), json.dumps({"how": how, "rest": rest, "wrong": wrong}))
    tell("over", dt.rank())


def _attempt(training: states.Training, root: Path, said: list[str], *, behind: bool) -> tuple[str, bool]:
    """A save that must fail: its error, and whether one behind training was not told of by the end of the next step."""
    if not behind:
        try:
            dt.save(root, state=training.state, keep=1)
        except dt.CheckpointError as error:
            return str(error), False
        return "", False
    under_way = dt.save(root, state=training.state, keep=1, wait=False)
    while not under_way.done:
        time.sleep(0.001)
    training.step()
    late = dt.is_main() and not any("has failed, training goes on" in line for line in said)
    try:
        under_way.wait()
    except dt.CheckpointError as error:
        return str(error), late
    return "", late


def worlds(small: Path, numbers: range, seed: int, sabotage: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for which, plan in enumerate(PLANS):
        mine = list(numbers)[which :: len(PLANS)]
        root = small / f"{plan}{sabotage.replace(' ', '')}"
        world = World(small.parent, 2, rank, str(root), plan, (mine, seed), sabotage)
        over = world.hear(lambda: len(world.values("over")) == 2, 300)  # noqa: B023
        world.end()
        told = [json.loads(line[2]) for line in world.told if line[0] == "row"]
        rows += [{"how": one["how"], "wrong": one["wrong"] + two["wrong"]} for one, two in _pairs(world)]
        if not over or len(told) != 2 * len(mine):
            rows.append({"how": plan, "wrong": [f"the world ended early: {world.said()}"]})
        shutil.rmtree(root, ignore_errors=True)
        (small / "ballast").unlink(missing_ok=True)
    return rows


def _pairs(world: World) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ranks = [[json.loads(line[2]) for line in world.told if line[:2] == ["row", str(rank)]] for rank in (0, 1)]
    return list(zip(*ranks, strict=False))


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    states.warm()
    small = mount(folder)
    rows = worlds(small, range(given.offsets), given.seed)
    twins = {}
    for sabotage in ("draft is not dropped", "failure is not told"):
        found = worlds(small, range(16), given.seed, sabotage)
        twins[sabotage] = [sum(bool(row["wrong"]) for row in found), len(found)]
    ways = {how: sum(row["how"] == how for row in rows) for how in ("wait", "behind", "looked")}
    ctypes.CDLL(None).umount2(str(small).encode(), 2)
    return {
        "trials": len(rows),
        "failed": sum(bool(row["wrong"]) for row in rows),
        "ways": ways,
        "wrong": [f"{row['how']}: {one}" for row in rows for one in row["wrong"]][:20],
        "sabotaged": twins,
        "said": ", ".join(f"{count} {how}" for how, count in ways.items()),
    }
