"""The rank processes of one variant, and rounds in which one variant works while all others sleep on their pipes.

Libraries that live in different environments cannot share a process group, so each variant has its own processes and
its own group for the whole run. A turn is timed from outside: from the command to every rank until the last says done.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.peers import BASES, IDEAL, PINS, VARIANTS

ROOT = Path(__file__).parents[1]
HOMES = ROOT / ".peers"
SECONDS_START, SECONDS_TURN = 400, 200
ROUNDS_A_LIFE = 10
MIB = 1 << 20
SAME_LOSS, SAME_TURNS = 1e-4, 5
"""Largest relative difference between losses of variants that train the same model, in their first turns: later ones
would also tell rounding apart. A clipped gradient differs by 3e-4 in the first turn, ranks that do not average by 7e-3.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One amount of work."""

    model: dict[str, int]
    """layers, d, vocabulary and length of the model."""
    batch: int
    """Rows a rank takes per step."""
    steps: int
    """Steps a variant takes in its turn."""
    parameters: int
    """Roughly, to know what fits into memory."""


@dataclass
class Outcome:
    """What one variant gave."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, backend, threads and peak memory, told by rank 0."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per step, one value a round."""
    losses: list[float] = field(default_factory=list)
    """Mean loss over ranks at the end of each turn."""
    seconds_idle: float = 0.0
    """How long it waited between its turns."""
    seconds_idle_cpu: float = 0.0
    """Processor seconds that its ranks together used meanwhile."""
    failed: str = ""
    """Why it gave nothing, or stopped."""


class RankError(RuntimeError):
    """A rank ended or did not answer."""


def environment(home: str) -> str:
    """The interpreter of an environment, which is made if it is missing or has other versions."""
    if not home:
        return sys.executable
    folder = HOMES / home
    if not _is_ready(home):
        print(f"installing {' '.join(PINS[home])}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "-q", *PINS[home]], check=True)
        (folder / "ready").write_text("\n".join(PINS[home]))
    return str(folder / "bin/python")


def _is_ready(home: str) -> bool:
    ready = HOMES / home / "ready"
    return not home or (ready.exists() and ready.read_text() == "\n".join(PINS[home]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """The processes of one variant."""

    def __init__(self, name: str, commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
        """Start them: for each rank its command and its environment."""
        logs = HOMES / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.logs = [logs / f"{name.replace(' ', '_')}.{rank}.log" for rank in range(len(commands))]
        self.processes = []
        for log, (command, environ) in zip(self.logs, commands, strict=True):
            with log.open("w") as stderr:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environ,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                    )
                )

    def ask(self, message: dict[str, Any], within: float) -> list[dict[str, Any]]:
        """Tell all ranks, and wait until the last has answered."""
        line, until = json.dumps(message) + "\n", time.monotonic() + within
        try:
            for process in self.processes:
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()
        except BrokenPipeError:
            raise RankError("a rank has ended; see .peers/logs") from None
        return [self._answer(rank, until) for rank in range(len(self.processes))]

    def _answer(self, rank: int, until: float) -> dict[str, Any]:
        pipe = _pipe(self.processes[rank].stdout)
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise RankError(f"rank {rank} did not answer in time; see .peers/logs/{self.logs[rank].name}")
        if not (line := pipe.readline()):
            said = [text for text in self.logs[rank].read_text().splitlines() if text.strip()]
            raise RankError(f"rank {rank} ended: {said[-1] if said else 'without a word'}")
        return dict(json.loads(line))

    def bytes_held(self) -> int:
        """Memory of all ranks, what they share counted once."""
        held = 0
        for process in self.processes:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            held += 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        return held

    def end(self) -> None:
        for process in self.processes:
            _pipe(process.stdin).close()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def environ_of(home: str, rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a rank of several on one host finds in its environment."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    if home:
        environ.pop("PYTHONPATH", None)
        environ["PATH"] = f"{HOMES / home / 'bin'}:{environ['PATH']}"  # deepspeed looks for ninja there
        environ["TORCH_EXTENSIONS_DIR"] = str(HOMES / home / "extensions")
    return environ


def start(name: str, num_ranks: int, setting: Setting, outcome: Outcome) -> Ranks | None:
    """Build and warm up one variant; None, and the reason in its outcome, where that fails."""
    variant = VARIANTS[name]
    first = {"file": variant.file, "word": variant.word, "model": setting.model, "batch": setting.batch, "warmup": 2}
    for lock in HOMES.glob("*/extensions/*/lock"):
        lock.unlink()  # of a build that was killed: torch would wait for it for ever
    command, port = [environment(variant.home), "-m", "benchmarks.peers.worker"], free_port()
    ranks = Ranks(name, [(command, environ_of(variant.home, rank, num_ranks, port)) for rank in range(num_ranks)])
    try:
        outcome.facts = ranks.ask(first, SECONDS_START)[0]
    except RankError as error:
        outcome.failed = str(error)
        ranks.end()
        return None
    outcome.facts["resting_mib"] = ranks.bytes_held() // MIB
    return ranks


def turn(ranks: Ranks, steps: int, outcome: Outcome) -> tuple[float, float]:
    """One variant's turn; gives the processor seconds that its ranks had used before and after it."""
    began = time.perf_counter()
    said = ranks.ask({"steps": steps}, SECONDS_TURN)
    outcome.seconds.append((time.perf_counter() - began) / steps)
    outcome.losses.append(sum(one["loss"] for one in said) / len(said))
    return sum(one["cpu"][0] for one in said), sum(one["cpu"][1] for one in said)


def rounds(names: list[str], num_ranks: int, setting: Setting, num_rounds: int) -> dict[str, Outcome]:
    """All variants beside each other: in every round each has one turn, in a new order.

    Their processes are started anew every `ROUNDS_A_LIFE` rounds: where the memory of a process happens to lie makes it
    faster or slower by some percent for as long as it lives.
    """
    outcomes = {name: Outcome() for name in names}
    shuffled = random.Random(0)
    for begun in range(0, max(1, num_rounds), ROUNDS_A_LIFE):
        alive = {name: outcome for name, outcome in outcomes.items() if not outcome.failed}
        _life(alive, num_ranks, setting, [shuffled.random() for _ in range(num_rounds)[begun : begun + ROUNDS_A_LIFE]])
    compare_losses(outcomes)
    return outcomes


def _life(outcomes: dict[str, Outcome], num_ranks: int, setting: Setting, seeds: list[float]) -> None:
    """A round for each seed of its order, from the start of all processes to their end."""
    there: dict[str, Ranks] = {}
    rested: dict[str, tuple[float, float]] = {}  # when a variant's last turn ended, and its processor seconds then
    try:
        for name, outcome in outcomes.items():
            if ranks := start(name, num_ranks, setting, outcome):
                there[name] = ranks
            print(f"  {name}: {outcome.failed or outcome.facts}", flush=True)
        for seed in seeds:
            for name in random.Random(seed).sample(list(there), len(there)):
                woken = time.perf_counter()
                try:
                    before, after = turn(there[name], setting.steps, outcomes[name])
                except RankError as error:
                    outcomes[name].failed = str(error)
                    there.pop(name).end()
                    continue
                if name in rested:
                    since, used = rested[name]
                    outcomes[name].seconds_idle += woken - since
                    outcomes[name].seconds_idle_cpu += before - used
                rested[name] = (time.perf_counter(), after)
    finally:
        for ranks in there.values():
            ranks.end()


def compare_losses(outcomes: dict[str, Outcome]) -> None:
    """Mark variants whose losses are not those of most others: they did not do the same work."""
    sound = {name: o.losses[:SAME_TURNS] for name, o in outcomes.items() if not o.failed and name != IDEAL}
    for name, losses in sound.items():
        near = [other for other in sound.values() if all(map(_near, losses, other))]
        if 2 * len(near) <= len(sound) or not all(map(math.isfinite, losses)):
            outcomes[name].failed = f"losses {losses[:3]} are not those of the other variants"


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_LOSS * abs(b)


def grouped(names: list[str], num_ranks: int, setting: Setting) -> tuple[bool, list[list[str]]]:
    """The fewest groups that fit into memory, the bases of all ratios in each; or, False, one variant at a time.

    A variant at rest keeps weights, two moments and what Python and the allocator hold; the one whose turn it is needs
    gradients and copies too.
    """
    bases, others = [n for n in names if n in BASES], [n for n in names if n not in BASES]
    resting, working = num_ranks * (12 * setting.parameters + 450 * MIB), num_ranks * 12 * setting.parameters
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    places = int((0.95 * int(line.split()[1]) * 1024 - working) // resting)
    for num_groups in range(1, max(1, len(others)) + 1):
        groups = [bases + others[k::num_groups] for k in range(num_groups)]
        if max(map(len, groups)) <= places:
            return True, groups
    return False, [[name] for name in names]


def prepare(homes: list[str], setting: Setting) -> None:
    """Make the environments that are missing, and start one variant in each alone: DeepSpeed compiles then."""
    for home in homes:
        if not _is_ready(home):
            environment(home)
            rounds([next(name for name, variant in VARIANTS.items() if variant.home == home)], 2, setting, 0)
