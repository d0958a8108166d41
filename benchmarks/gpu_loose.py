"""One GPU: plans of loose exchange with four ranks on it over gloo, beside the same plan on the CPU; what is reserved.

Every plan trains once with its model on the GPU and once on the CPU, in float64: tests hold the CPU's result against
the algorithm written out, or against one process. Then codes of wires, bytes and numbers, GPU beside CPU; then what a
rank gets that takes more GPU memory than `DISTRIBUTEDTORCH_RESERVE` leaves it.
`python benchmarks/gpu_loose.py OUT [cpu]` writes OUT/gpu_loose.json; `cpu`: both on the CPU, to try the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
import distributedtorch as dt  # noqa: E402
from benchmarks.step_time import machine  # noqa: E402
from distributedtorch.distribute import release  # noqa: E402
from distributedtorch.wire.cast import Bf16, Fp16  # noqa: E402
from distributedtorch.wire.pieces import PIECE  # noqa: E402
from distributedtorch.wire.quantize import Int2, Int4, Int8, Sign  # noqa: E402
from distributedtorch.wire.sparsify import RandomK, TopK  # noqa: E402
from tests.conformance.cases import difference  # noqa: E402

ZEROS = ("zero1", "zero2", "zero3")
WIRES = ("bf16", "fp16", "int8", "int4", "int2", "sign", "topk(0.05)", "randomk(0.05)", "powersgd(rank=2)")
PLANS = (
    *(f"{zero},replicate={count}" for zero in ZEROS for count in (2, 4)),
    *(f"{sync},delay=1" for sync in ("ddp", *ZEROS)),
    *(f"zero3,wire={wire}" for wire in WIRES[:3]),
    *(f"zero2,wire={wire}" for wire in WIRES[:6]),
    *(f"ddp,wire={wire}" for wire in WIRES),
    *("local(every=3)", "local(every=3),wire=int8", "diloco(every=3),wire=topk(0.05)", "gossip", "groups(every=3)"),
    *("local(every=3),delay=2", "diloco(every=3),delay=3,wire=int8", "local(every=3),delay=1,wire=powersgd(rank=2)"),
    *("local(every=3,rows=used)", "diloco(every=3,rows=used),wire=int8", "local(every=3,rows=used),delay=2,wire=int4"),
)
SAME_BYTES = ("Bf16", "Fp16", "Int8")
STEPS, GIB = 7, 1 << 30


def train(plan: str, device: str) -> dict[str, torch.Tensor]:
    """Layers of which one is larger than four pieces of a code; with `rows=used` a table before them, under Adam."""
    torch.manual_seed(0)
    layers = nn.Linear(24, 1100), nn.Tanh(), nn.Linear(1100, 2000), nn.Tanh(), nn.Linear(2000, 3)
    table = [nn.Embedding(40, 24)] if "rows=used" in plan else []
    model: Any = nn.Sequential(*table, *layers).double().to(device)
    kind: Any = partial(torch.optim.Adam, lr=1e-3) if table else partial(torch.optim.SGD, lr=0.05, momentum=0.5)
    model, optimizer = dt.distribute(model, kind(model.parameters()), plan=plan)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + dt.rank())
        x = torch.randn(6, 24, generator=draw, dtype=torch.float64).to(device)
        given = (10 * x[:, 0]).abs().long().clamp(max=39) if table else x  # low rows come more often
        F.mse_loss(model(given), x[:, :3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dt.sync()
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    release()
    return state


def plans(ranks: int) -> list[str]:
    return [plan for plan in PLANS if ranks == 4 or "replicate=4" not in plan]


def inside(device: str) -> None:
    for plan in plans(dt.world()):
        try:
            gap = difference(train(plan, "cpu"), train(plan, device))[0]
        except Exception as error:
            gap = float("nan")
            print(f"rank {dt.rank()}, {plan}: {error!r}", file=sys.stderr, flush=True)
        dt.print("ROW " + json.dumps({"plan": plan, "ranks": dt.world(), "difference": gap}), flush=True)


def codes(device: str) -> list[dict[str, Any]]:
    rows = []
    for code in (Bf16(), Fp16(), Int8(), Int4(), Int2(), Sign(), TopK(0.01), RandomK(0.05)):
        for numel in (777, 3 * PIECE + 777):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
            host, there = (code.encode(v, 5, torch.Generator().manual_seed(1)) for v in (values, values.to(device)))
            one, two = (code.decode(c, numel, values.dtype, 5).cpu() for c in (host, there))
            gap = float((one - two).abs().max())
            rows.append({"code": type(code).__name__, "numel": numel, "difference": gap})
            rows[-1]["bytes that differ"] = int((host != there.cpu()).sum())
    return rows


def take() -> None:
    """A rank that takes a GiB, and then three."""
    device = dt.device()
    model = nn.Linear(4, 4).to(device)
    dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = [torch.empty(GIB, dtype=torch.uint8, device=device)]
    dt.print("took one", flush=True)
    kept.append(torch.empty(3 * GIB, dtype=torch.uint8, device=device))


def run(*words: str, ranks: int, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), __file__, *words]
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True, check=False
    )


def reserved(device: str) -> dict[str, Any]:
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else os.sysconf("SC_PHYS_PAGES") * 4096
    memory = f"memory={(total - 2 * 3 * GIB) >> 20}MiB"
    refused = run("--take", ranks=2, DISTRIBUTEDTORCH_RESERVE=memory)
    none = run("--take", ranks=2, DISTRIBUTEDTORCH_RESERVE="devices=1")
    return {
        "took one of 3 GiB": "took one" in refused.stdout,
        "three more refused in words": refused.returncode == 1 and "DISTRIBUTEDTORCH_RESERVE: " in refused.stderr,
        "the only GPU cannot be reserved": none.returncode == 1 and "devices=1 on a host where" in none.stderr,
        "without it": run("--take", ranks=2).returncode == 0,
    }


def main(folder: Path, device: str) -> int:
    rows: list[dict[str, Any]] = []
    bad: list[Any] = []
    for ranks, bucket in ((2, 1 << 25), (4, 1 << 18)):  # of more than two pieces of a code; many
        ended = run("--inside", device, ranks=ranks, DISTRIBUTEDTORCH_BUCKET_BYTES=str(bucket))
        came = [json.loads(line[4:]) for line in ended.stdout.splitlines() if line.startswith("ROW ")]
        bad += [f"{ranks} ranks ended with {ended.returncode}"] if ended.returncode else []
        bad += sorted(set(plans(ranks)) - {row["plan"] for row in came})
        rows += came
        print(ended.stderr[-3000:] if ended.returncode else f"{len(rows)} plans", flush=True)
    bad += [row for row in rows if not row["difference"] <= 1e-9]
    found, held = codes(device), reserved(device)
    bad += [row for row in found if not row["difference"] <= 1e-6] + [key for key, ok in held.items() if not ok]
    bad += [row for row in found if row["code"] in SAME_BYTES and row["bytes that differ"]]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result = {"machine": machine(), "device": name, "plans": rows, "codes": found, "reserved": held, "bad": bad}
    (folder / "gpu_loose.json").write_text(json.dumps(result, indent=1))
    print(f"{name}: {len(rows)} plans, {len(found)} codes, {held}; bad: {bad}")
    return len(bad)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        dt.barrier()
        inside(sys.argv[2])
    elif sys.argv[1] == "--take":
        take()
    else:
        sys.exit(main(Path(sys.argv[1]), (sys.argv[2:] or ["cuda"])[0]))
