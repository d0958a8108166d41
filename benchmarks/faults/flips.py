"""C3: every single bit of a checkpoint of 64 KiB flipped, and 10,000 of one of 50 MB: each is found, its file named."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import distributedtorch as dt
from benchmarks.faults import states
from benchmarks.faults.states import Memory
from distributedtorch.checkpoint import blocks, index
from distributedtorch.checkpoint.index import Reader
from tests.checkpoint.files import write

_PROCESSES = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=int, default=10_000, help="in the checkpoint of 50 MB")
    parser.add_argument("--seed", type=int, default=0)


def found(there: Memory, folder: str, file: str, share: int, shares: int) -> bool:
    """Whether a reader notices, and names the file."""
    try:
        Reader(there, folder, index.read(there, folder)).check(share, shares)
    except dt.CheckpointError as error:
        return file in str(error)
    return False


def every(there: Memory, part: int, parts: int, stride: int = 1) -> tuple[int, list[str]]:
    """Every bit of one part of the bytes: how many were flipped, which were missed."""
    tried, missed = 0, []
    ((folder, files),) = there.folders.items()
    for file, content in files.items():
        for at in range(part * stride, len(content), parts * stride):
            for bit in range(8):
                content[at] ^= 1 << bit
                if not found(there, folder, file, 0, 1):
                    missed.append(f"{file}: bit {bit} of byte {at}")
                content[at] ^= 1 << bit
                tried += 1
    return tried, missed


def drawn(there: Memory, part: int, parts: int, flips: int, seed: int) -> tuple[int, list[str]]:
    """Random bits of a large one. Each is looked for by the rank, of one per block, whose share it falls in."""
    draw, missed = random.Random(f"{seed}/{part}"), []
    ((folder, files),) = there.folders.items()
    numbers = {}  # as Reader.check counts blocks
    for name in sorted(files.keys() - {"checkpoint.json"}):
        numbers[name] = len(numbers) and sum(-(-len(files[n]) // blocks.BLOCK) for n in numbers)
    shares = sum(-(-len(files[name]) // blocks.BLOCK) for name in numbers)
    tried = range(part, flips, parts)
    for _ in tried:
        file = draw.choices(list(files), [len(content) for content in files.values()])[0]
        at, bit = draw.randrange(len(files[file])), draw.randrange(8)
        files[file][at] ^= 1 << bit
        share = numbers.get(file, 0) + at // blocks.BLOCK
        if not found(there, folder, file, share % shares, shares):
            missed.append(f"{file}: bit {bit} of byte {at}")
        files[file][at] ^= 1 << bit
    return len(tried), missed


def divided(task: Any, *args: Any) -> tuple[int, list[str]]:
    """A task in several processes, each with its part."""
    pipes = []
    for part in range(_PROCESSES):
        ear, mouth = os.pipe()
        if os.fork() == 0:
            try:
                tried, missed = task(args[0], part, _PROCESSES, *args[1:])
                os.write(mouth, json.dumps([tried, len(missed), missed[:5]]).encode())
            finally:
                os._exit(0)
        os.close(mouth)
        pipes.append(ear)
    told = []
    for ear in pipes:
        with open(ear, "rb") as pipe:
            told.append(json.loads(pipe.read()))
    for _ in pipes:
        assert os.wait()[1] == 0
    missed = [one for part in told for one in part[2]]
    count = sum(part[1] for part in told)
    return sum(part[0] for part in told), missed + ["..."] * (count - len(missed))


def run(given: argparse.Namespace, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    states.warm()
    write(folder / "small", 1.0, 8100)
    write(folder / "large", 1.0, 6_250_000)
    small, large = states.held(folder / "small"), states.held(folder / "large")
    sizes = [sum(map(len, next(iter(one.folders.values())).values())) for one in (small, large)]
    tried, missed = divided(every, small)
    drawn_tried, drawn_missed = divided(drawn, large, given.flips, given.seed)
    honest, blocks.hashlib = blocks.hashlib, states.NoHash  # type: ignore[assignment]
    twin_tried, twin_missed = divided(every, small, 61)
    blocks.hashlib = honest
    return {
        "trials": tried + drawn_tried,
        "failed": len(missed) + len(drawn_missed),
        "bytes": sizes,
        "every bit": [tried, len(missed)],
        "random bits": [drawn_tried, len(drawn_missed)],
        "wrong": (missed + drawn_missed)[:20],
        "sabotaged": {"no hash of blocks": [len(twin_missed), twin_tried]},
        "said": f"all {tried:,} bits of {sizes[0]:,} bytes and {drawn_tried:,} of {sizes[1]:,}",
    }
