"""The exchange alone: ours beside gloo, Open MPI, DeepSpeed's shared memory and a plain copy, in the same processes.

float32, one thread a rank, all ranks on this host. A size is that of the whole buffer: an all-reduce sums it, a
reduce-scatter leaves each rank one part of the sum, an all-gather fills it from parts; the plain copy is `copy_` of as
many bytes on all ranks at once. "in place" exchanges a tensor of the shared segment, "copied" one that lies elsewhere.
In each round every variant has one turn, in a new order; a turn lasts until the slowest rank is done. Every result is
compared with the sum written out before the first round and after the last. Ratios are taken within rounds.

`python -m benchmarks.exchange [--ranks 2 4] [--rounds 40] [--quick]` makes .peers/exchange where it is missing (torch,
DeepSpeed, mpi4py; Open MPI itself must be there: mpirun, mpicc) and writes benchmarks/results/exchange.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.conductor import HOMES, ROOT, environment
from benchmarks.step_time import interval, machine
from distributedtorch.core.comm import Comm

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 110 * MIB)
KINDS = ("all-reduce", "reduce-scatter", "all-gather")
OURS, COPIED, GLOO, MPI, DEEPSPEED, COPY = "in place", "copied", "gloo", "Open MPI", "DeepSpeed", "memcpy"
SECONDS_A_TURN = 0.02
"""Small exchanges are repeated until a turn lasts about this long, but not more than 200 times."""
Turn = Callable[[], None]


class Case:
    """One kind and size: every variant's memory and what it does with it."""

    def __init__(self, comm: Comm, kind: str, size: int, peers: dict[str, Any]) -> None:
        self.comm, self.kind = comm, kind
        numel = size // 4 // comm.world * comm.world
        self.bounds = [numel * k // comm.world for k in range(comm.world + 1)]
        self.own = slice(self.bounds[comm.rank], self.bounds[comm.rank + 1])
        self.segment = comm.pool.zeros(numel, torch.float32)
        self.plain = torch.zeros(numel)
        self.part = torch.zeros(numel // comm.world)
        """What gloo gives a rank of a reduce-scatter, or takes for an all-gather."""
        target = torch.zeros(numel)
        self.turns: dict[str, tuple[Tensor, Turn]] = {
            OURS: (self.segment, lambda: self._ours(self.segment)),
            COPIED: (self.plain, lambda: self._ours(self.plain)),
            GLOO: (self.plain, self._gloo),
            COPY: (self.plain, lambda: _copy(target, self.plain)),
        }
        if MPI in peers:
            self.turns[MPI] = (self.plain, self._mpi(peers[MPI]))
        if DEEPSPEED in peers and kind == "all-reduce":
            self.turns[DEEPSPEED] = (self.plain, lambda: peers[DEEPSPEED](self.plain))

    def _ours(self, flat: Tensor) -> None:
        if self.kind == "all-reduce":
            self.comm.all_reduce("sum", flat, self.bounds).wait()
        elif self.kind == "reduce-scatter":
            self.comm.reduce_scatter("part", flat, self.bounds).wait()
        else:
            self.comm.all_gather("all", flat, self.bounds).wait()

    def _gloo(self) -> None:
        if self.kind == "all-reduce":
            dist.all_reduce(self.plain)
        elif self.kind == "reduce-scatter":
            _named("reduce_scatter_single", "reduce_scatter_tensor")(self.part, self.plain)
        else:
            _named("all_gather_single", "all_gather_into_tensor")(self.plain, self.part)

    def _mpi(self, mpi: Any) -> Turn:
        array, world = self.plain.numpy(), mpi.COMM_WORLD
        counts = [self.part.numel()] * self.comm.world
        if self.kind == "all-reduce":
            return lambda: world.Allreduce(mpi.IN_PLACE, array)
        if self.kind == "reduce-scatter":
            return lambda: world.Reduce_scatter(mpi.IN_PLACE, array, counts)
        return lambda: world.Allgather(mpi.IN_PLACE, array)

    def check(self, serial: int) -> None:
        """Every variant once, with values that tell ranks and places apart."""
        numel = self.plain.numel()
        parts = [_drawn(rank, numel, serial) for rank in range(self.comm.world)]
        mine = parts[self.comm.rank]
        pieces = [part.chunk(self.comm.world)[rank] for rank, part in enumerate(parts)]
        expected = torch.cat(pieces) if self.kind == "all-gather" else sum(parts[1:], parts[0])
        for name, (flat, turn) in self.turns.items():
            if name == COPY:
                continue
            flat.zero_()
            chosen = self.own if self.kind == "all-gather" else slice(None)
            flat[chosen] = mine[chosen]
            self.part.copy_(mine[self.own])
            self.comm.barrier()
            turn()
            found, due = flat, expected
            if self.kind == "reduce-scatter":
                found = self.part if name == GLOO else flat[: self.part.numel()] if name == MPI else flat[self.own]
                due = expected[self.own]
            assert torch.equal(found, due), f"{name}: {self.kind} of {numel} elements is wrong"
        for tensor in (self.segment, self.plain, self.part):
            tensor.zero_()  # sums of zeros stay zeros, however often they are taken


def _drawn(rank: int, numel: int, serial: int) -> Tensor:
    """Whole numbers: their sums are the same in any order."""
    return torch.randint(-999, 999, (numel,), generator=torch.Generator().manual_seed(97 * serial + rank)).float()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _named(new: str, old: str) -> Callable[[Tensor, Tensor], object]:
    found: Callable[[Tensor, Tensor], object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def peers_here(comm: Comm) -> tuple[dict[str, Any], dict[str, str]]:
    """The other libraries of this process, and for those that cannot be had, why."""
    found: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, load in ((MPI, _load_mpi), (DEEPSPEED, _load_deepspeed)):
        reason = ""
        try:
            found[name] = load(comm)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        said = [text.decode() for text in comm.bytes_of_all(name, reason.encode())]
        if any(said):
            absent[name] = next(text for text in said if text)
            found.pop(name, None)
    return found, absent


def _load_mpi(comm: Comm) -> Any:
    from mpi4py import MPI as mpi  # type: ignore[import-not-found]

    if mpi.COMM_WORLD.size != comm.world:
        raise RuntimeError(f"MPI sees {mpi.COMM_WORLD.size} ranks of {comm.world}: not started by its mpirun")
    return mpi


def _load_deepspeed(comm: Comm) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(comm.world)}
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

    for rank in range(2):  # it is compiled by the first, and read by the others
        if min(comm.rank, 1) == rank:
            module = ShareMemCommBuilder().load(verbose=False)
        comm.barrier()
    if module.vector_kernel_level() < 1:
        raise RuntimeError("its kernels need AVX2")
    module.initialize(comm.world, comm.rank)
    comm.barrier()  # all have opened it
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    Path(f"/dev/shm/{name}_{comm.rank}").unlink()  # it would stay there for ever
    return torch.ops.deepspeed.inference_all_reduce_


def measure(rounds: int, sizes: tuple[int, ...], out: Path) -> None:
    """In every rank: all cases, one after the other."""
    import distributedtorch as dt
    from distributedtorch.core.world import here

    torch.set_num_threads(1)
    dt.barrier()
    comm = here().comm
    assert comm.shared is not None, comm.unshared
    peers, absent = peers_here(comm)
    shuffled, rows = random.Random(0), []
    for serial, (kind, size) in enumerate((kind, size) for kind in KINDS for size in sizes):
        case = Case(comm, kind, size, peers)
        case.check(serial)
        times = {name: _times(comm, turn) for name, (_, turn) in case.turns.items()}
        seconds: dict[str, list[float]] = {name: [] for name in case.turns}
        for _ in range(rounds):
            for name in shuffled.sample(list(case.turns), len(case.turns)):
                seconds[name].append(_turn(comm, case.turns[name][1], times[name]))
        case.check(serial + 100)
        own = torch.tensor([seconds[name] for name in case.turns], dtype=torch.float64)
        slowest = comm.exchange("seconds", own).amax(0)
        row = {name: slowest[k].tolist() for k, name in enumerate(case.turns)}
        rows.append({"kind": kind, "bytes": size, "times": times, "seconds": row})
        dt.print(f"  {kind} {_size(size)}", flush=True)
    if comm.rank == 0:
        versions = {name: version(name) for name in ("torch", "deepspeed", "mpi4py")}
        if MPI in peers:
            versions[MPI] = peers[MPI].Get_library_version().split(",")[0]
        out.write_text(json.dumps({"ranks": comm.world, "versions": versions, "absent": absent, "rows": rows}))


def _turn(comm: Comm, turn: Turn, times: int) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(times):
        turn()
    return (time.perf_counter() - began) / times


def _times(comm: Comm, turn: Turn) -> int:
    """How often a turn repeats it, agreed by all ranks; this warms up, too."""
    took = min(_turn(comm, turn, 2) for _ in range(2))
    slowest = float(comm.exchange("took", torch.tensor([took])).max())
    return int(min(200, max(1, SECONDS_A_TURN / slowest)))


def start(ranks: int, rounds: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One run of so many ranks."""
    python = environment("exchange")
    for lock in HOMES.glob("exchange/extensions/*/lock"):
        lock.unlink()  # of a build that was killed: torch would wait for it for ever
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environ["PATH"] = f"{HOMES / 'exchange/bin'}:{environ['PATH']}"  # deepspeed looks for ninja there
    environ["TORCH_EXTENSIONS_DIR"] = str(HOMES / "exchange/extensions")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        command = f"mpirun -n {ranks} --oversubscribe --allow-run-as-root --bind-to none".split()
        command += [python, "-m", "benchmarks.exchange", "--inside", str(out), "--rounds", str(rounds), "--sizes"]
        subprocess.run([*command, *map(str, sizes)], cwd=ROOT, env=environ, check=True)
        return dict(json.loads(out.read_text()))


def summarise(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians and ratios of every case, printed as a table."""
    table = []
    for row in run["rows"]:
        seconds, line = row["seconds"], {"ranks": run["ranks"], "kind": row["kind"], "bytes": row["bytes"]}
        line["us"] = {name: [round(1e6 * v, 1) for v in interval(values)] for name, values in seconds.items()}
        for name, above, below in (("gloo / ours", GLOO, OURS), ("ours / memcpy", OURS, COPY)):
            ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            line[name] = [round(v, 2) for v in interval(ratios)]
        table.append(line)
        said = "  ".join(f"{name} {v[0]:.0f} [{v[1]:.0f}, {v[2]:.0f}]" for name, v in line["us"].items())
        ratios_said = "  ".join(f"{name} {line[name]}" for name in ("gloo / ours", "ours / memcpy"))
        print(f"{line['ranks']} ranks {line['kind']:14} {_size(line['bytes']):8} us: {said}   {ratios_said}")
    return table


def verdicts(table: list[dict[str, Any]]) -> dict[str, list[str]]:
    """For every bar the cases that miss it, by their medians."""
    bars: dict[str, list[str]] = {}
    for line in table:
        if line["kind"] != "all-reduce":
            bar, name, met = f"{line['kind']} at least 4 x gloo", "gloo / ours", line["gloo / ours"][0] >= 4
        elif line["bytes"] <= MIB:
            bar, name, met = "all-reduce up to 1 MiB at least 4 x gloo", "gloo / ours", line["gloo / ours"][0] >= 4
        else:
            bar, name, met = "all-reduce above within 2 x memcpy", "ours / memcpy", line["ours / memcpy"][0] <= 2
        missed = bars.setdefault(bar, [])
        if not met:
            missed.append(f"{line['ranks']} ranks {_size(line['bytes'])}: {name} {line[name]}")
    return bars


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--quick", action="store_true", help="3 rounds up to 1 MiB, nothing is stored")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return measure(given.rounds, tuple(given.sizes), given.inside)
    rounds, sizes = (3, SIZES[:3]) if given.quick else (given.rounds, tuple(given.sizes))
    runs = [start(ranks, rounds, sizes) for ranks in given.ranks]
    table = [line for run in runs for line in summarise(run)]
    missed = verdicts(table)
    for bar, cases in missed.items():
        print(f"{bar}: {'missed by ' + '; '.join(cases) if cases else 'met everywhere'}")
    for ranks, name, reason in [(run["ranks"], *item) for run in runs for item in run["absent"].items()]:
        print(f"not measured at {ranks} ranks: {name} ({reason})")
    about = machine() | {"command": " ".join(["python -m benchmarks.exchange", *sys.argv[1:]])}
    result = {"machine": about, "rounds": rounds, "table": table, "missed": missed, "runs": runs}
    if not given.quick:
        (ROOT / "benchmarks/results/exchange.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
