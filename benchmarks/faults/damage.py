"""C4: files cut short, grown, missing, added or swapped; two ranks name the file and take the checkpoint before."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import Tell, World
from distributedtorch.checkpoint import blocks, place
from distributedtorch.core.world import here
from distributedtorch.launch import record

Damage = Callable[[Path], None]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=1000, help="lengths to cut files at")
    parser.add_argument("--seed", type=int, default=0)


def _cut(file: str, length: int) -> Damage:
    return lambda root: os.truncate(_newest(root) / file, length)


def _grow(file: str, more: bytes) -> Damage:
    def grow(root: Path) -> None:
        with (_newest(root) / file).open("ab") as opened:
            opened.write(more)

    return grow


def _remove(file: str) -> Damage:
    return lambda root: (_newest(root) / file).unlink()


def _add(file: str, extra: str) -> Damage:
    return lambda root: shutil.copy(_newest(root) / file, _newest(root) / extra) and None


def _swap(file: str, other: str) -> Damage:
    def swap(root: Path) -> None:
        one, two = _newest(root) / file, _newest(root) / other
        whole = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(whole)

    return swap


def _older(file: str) -> Damage:
    """The same file of the checkpoint before, in the place of this one's."""

    def older(root: Path) -> None:
        before, now = sorted(root.glob("*-step-*"))
        shutil.copy(before / file, now / file)

    return older


def _newest(root: Path) -> Path:
    return max(root.glob("*-step-*"))


def cases(root: Path, trials: int, seed: int) -> list[tuple[str, str, Damage]]:
    """Kind, the file that must be named, and what is done."""
    draw, sizes = random.Random(seed), place.of(root).files(_newest(root).name)
    data = sorted(sizes.keys() - {"checkpoint.json"})
    made = []
    for number in range(trials):
        file = sorted(sizes)[number % len(sizes)]
        made.append(("cut", file, _cut(file, draw.randrange(sizes[file]) if number >= len(sizes) else 0)))
    made += [("grown", file, _grow(file, draw.randbytes(draw.randint(1, 100)))) for file in sizes for _ in range(5)]
    made += [("missing", file, _remove(file)) for file in sizes]
    made += [("extra", f"{file[:6]}0000{n}.safetensors", _add(file, f"{file[:6]}0000{n}.safetensors"))
             for file in data for n in (7, 8)]  # fmt: skip
    made += [("swapped", min(one, two), _swap(one, two)) for one in data for two in data if one < two]
    made += [("of another save", file, _older(file)) for file in data]
    return made


def _restored(root: Path, good: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(good, root)


def loader(tell: Tell, path: str, trials: int, seed: int, sabotage: bool) -> None:
    """One of two ranks: rank 0 damages the newest checkpoint, both load, both must have the one before."""
    training, root, good = states.Training("zero1", 500), Path(path), Path(path + "-good")
    said: list[str] = []
    record.say = said.append
    for _ in range(2):
        training.step()
        dt.save(root, state=training.state)
    if dt.is_main():
        shutil.copytree(root, good)
    dt.barrier()
    if sabotage:
        blocks.hashlib = states.NoHash  # type: ignore[assignment]
    for kind, file, damage in cases(good, trials, seed):
        if dt.is_main():
            damage(root)
        dt.barrier()
        said.clear()
        try:
            dt.load(root, state=training.state)
            value = training.counted.value
        except dt.CheckpointError as error:
            value, said = -1, [str(error)]
        steps = here().loop.steps
        weight = float(next(training.model.parameters())[0])
        row = {"kind": kind, "file": file, "values": [value, steps, weight], "named": any(file in one for one in said)}
        tell("row", dt.rank(), json.dumps(row))
        dt.barrier()
        if dt.is_main():
            _restored(root, good)
    tell("over", dt.rank())


def loaded(folder: Path, name: str, given: argparse.Namespace, *, sabotage: bool) -> tuple[Counter[str], list[str]]:
    world = World(folder, 2, loader, str(folder / name), given.trials if not sabotage else 20, given.seed, sabotage)
    over = world.hear(lambda: len(world.values("over")) == 2, 540)
    world.end()
    ranks = [[json.loads(line[2]) for line in world.told if line[:2] == ["row", str(rank)]] for rank in (0, 1)]
    assert over or not sabotage, world.said()
    tried: Counter[str] = Counter()
    wrong = [] if over else [f"the world ended early: {world.said()}"]
    for mine, other in zip(*ranks, strict=False):
        tried[mine["kind"]] += 1
        if mine["values"] != [1, 1, 1.0] or other["values"] != [1, 1, 1.0] or not mine["named"]:
            wrong.append(f"{mine} and {other['values']}")
    return tried, wrong


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    states.warm()
    tried, wrong = loaded(folder, "c", given, sabotage=False)
    twin, noticed = loaded(folder, "twin", given, sabotage=True)
    return {
        "trials": sum(tried.values()),
        "failed": len(wrong),
        "kinds": dict(tried),
        "wrong": wrong[:20],
        "sabotaged": {"no hash of blocks": [len(noticed), sum(twin.values())]},
        "said": ", ".join(f"{count} {kind}" for kind, count in tried.items()),
    }
