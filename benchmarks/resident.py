"""Resident memory per rank and per host on a model of 100M parameters, plans beside torch's own.

After some steps, in processes of their own: what a rank sees resident (RSS), and its share of it where pages are shared
(PSS), both above what stood after imports. PSS adds up to what the host holds. Both as they are, and after the C
library has given back what it keeps of freed memory (malloc_trim): what is really in use.
`python benchmarks/resident.py [--ranks 2 4]` prints a row per variant and writes benchmarks/results/resident.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import Gpt, machine  # noqa: E402

VARIANTS = ("torch DDP", "torch fully_shard", "ddp", "zero1", "zero1,share", "zero2", "zero2,share", "zero3")
STEPS, MIB = 4, 1 << 20


def resident() -> dict[str, int]:
    """Bytes of this process: resident, and its share of them."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    found = {row[0]: int(row[1]) * 1024 for row in rows if row[0] in ("Rss:", "Pss:")}
    return {"rss": found["Rss:"], "pss": found["Pss:"]}


def inside(variant: str, out: Path) -> None:
    import distributedtorch as dt

    torch.set_num_threads(1)
    dt.barrier()
    before = resident()
    torch.manual_seed(0)
    model: nn.Module = Gpt(layers=12, d=768, vocabulary=20480, length=16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if variant == "torch fully_shard":
        for block in (*model.blocks, model):  # type: ignore[union-attr,misc]
            fully_shard(block)
    elif variant == "torch DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not variant.startswith("torch"):
        model, optimizer = dt.distribute(model, optimizer, plan=variant)
    ids = torch.randint(0, 20480, (1, 17))
    for _ in range(STEPS):
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    row = {"parameters": size}
    for state in ("as it is", "in use"):
        dt.barrier()
        row |= {f"{kind} {state}": size - before[kind] for kind, size in resident().items()}
        dt.barrier()
        ctypes.CDLL(None).malloc_trim(0)
    (out / f"rank{dt.rank()}.json").write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return inside(given.inside[0], Path(given.inside[1]))
    results = []
    for ranks in given.ranks:
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), __file__]
                environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
                subprocess.run([*command, "--inside", variant, folder], env=environ, check=True, capture_output=True)
                rows = [json.loads((Path(folder) / f"rank{k}.json").read_text()) for k in range(ranks)]
            host = {state: sum(row[f"pss {state}"] for row in rows) for state in ("as it is", "in use")}
            results.append({"variant": variant, "ranks": ranks, "rows": rows, "host": host})
            most = {key: max(row[key] for row in rows) / MIB for key in rows[0]}
            print(
                f"{variant:18} {ranks} ranks, {most['parameters']:.0f} MiB of parameters: MiB of a rank "
                f"{most['rss as it is']:6.0f}, in use {most['rss in use']:6.0f}; "
                f"of the host {host['as it is'] / MIB:6.0f}, in use {host['in use'] / MIB:6.0f}",
                flush=True,
            )
    written = {"machine": machine(), "steps": STEPS, "results": results}
    (ROOT / "benchmarks/results/resident.json").write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
