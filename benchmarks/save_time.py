"""Seconds of a save beside torch's own and beside `cp`, in one run: `python benchmarks/save_time.py [--rounds 10]`.

Two ranks hold a GPT of 23M parameters with AdamW (280 MB) under ddp, and save it in turn by dt.save (every block
hashed, files and folders flushed), by torch.distributed.checkpoint, by dt.save(wait=False) and by save_every; rank 0
copies the files with cp and flushes them. Every round writes new folders; the old ones are removed outside the time.
Writes benchmarks/results/save_time.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import Gpt, machine  # noqa: E402


def timed(act: Callable[[], object]) -> float:
    import distributedtorch as dt

    dt.barrier()
    began = time.perf_counter()
    act()
    dt.barrier()
    return time.perf_counter() - began


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.rglob("*")], check=True)


def inside(folder: Path, rounds: int) -> None:
    """Both ranks."""
    import distributedtorch as dt
    from distributedtorch import behind

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(layers=6, d=512, vocabulary=8192, length=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = dt.distribute(model, optimizer, plan="ddp")
    ids = torch.randint(0, 8192, (4, 129))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    step()
    rows: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        ours, theirs, copied = folder / f"ours-{number}", folder / f"dcp-{number}", folder / f"cp-{number}"
        rows["dt.save"].append(timed(lambda: dt.save(ours)))  # noqa: B023
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        rows["torch.distributed.checkpoint"].append(timed(lambda: dcp.save(state, checkpoint_id=theirs)))  # noqa: B023
        newest = next(ours.glob("*-step-*"))
        rows["cp and flush"].append(timed(lambda: copy(newest, copied) if dt.is_main() else None))  # noqa: B023
        rows["a step"].append(timed(step))
        under_way = dt.save(ours, wait=False)
        under_way.wait()
        rows["held by dt.save(wait=False)"].append(under_way.stalled)
        with contextlib.redirect_stderr(None):
            dt.resume(folder / "every", save_every=1)
        step()
        behind.STATE.every.steps = 1 << 30  # one is enough
        step()
        step()
        behind.settle()
        rows["held by save_every"].append(behind.STATE.last.stalled)
        behind.STATE.every = None
        dt.barrier()
        if dt.is_main():
            size = sum(file.stat().st_size for file in newest.iterdir())
            for path in (folder / "every", ours, theirs, copied):
                shutil.rmtree(path)
        dt.barrier()
    if dt.is_main():
        found = {name: values[1:] for name, values in rows.items()}  # the first of each warms up
        (folder / "rows.json").write_text(json.dumps({"bytes": size, "seconds": found}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.rounds)
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        command = [sys.executable, "-m", "distributedtorch", "run", "--workers", "2", __file__]
        subprocess.run([*command, "--rounds", str(given.rounds), "--inside", name], check=True, capture_output=True)
        found = json.loads((Path(name) / "rows.json").read_text())
    seconds = found["seconds"]
    medians = {word: statistics.median(values) for word, values in seconds.items()}
    for word, value in medians.items():
        spread = f"{min(seconds[word]):.3f} to {max(seconds[word]):.3f}"
        print(f"{word:32} {value:.3f} s ({spread}), {found['bytes'] / value / 1e6:.0f} MB/s")
    ratios = {
        word: statistics.median([a / b for a, b in zip(seconds["dt.save"], seconds[word], strict=True)])
        for word in ("torch.distributed.checkpoint", "cp and flush")
    }
    held = medians["held by save_every"] / medians["dt.save"]
    print(f"dt.save takes {ratios}; behind training it holds the training thread for {held:.1%} of that")
    results = {"machine": machine(), **found, "medians": medians, "ratios of dt.save to": ratios, "held": held}
    (ROOT / "benchmarks/results/save_time.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
