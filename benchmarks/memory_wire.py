"""Memory and bytes on the wire of every plan on a model of 100M parameters, against ZeRO's formulas.

Runs in a network namespace of its own, so that the loopback interface counts this job's bytes only (needs root and
`unshare`). There each connection's packets are handled on one core: loopback on several cores delivers out of order,
and TCP then sends 1-3% of everything twice, whatever the program. Nor does it probe there for lost tails: loopback
loses nothing, but a busy core acknowledges late, and each probe then sends a segment again, on loopback up to 64 KB.
`python benchmarks/memory_wire.py` writes benchmarks/results/memory_wire.json.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import json
import os
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.step_time import Gpt, machine  # noqa: E402

STEPS = 3
MIB = 1 << 20
_NEW_NETWORK, _NEW_MOUNTS, _PRIVATE = 0x40000000, 0x00020000, (1 << 18) | (1 << 14)


def counters() -> int:
    """Bytes sent over loopback in this network namespace."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def sent_again() -> int:
    """TCP segments sent more than once in this network namespace; loopback loses none, so for nothing."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return int(values[names.index("RetransSegs")])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def inside(out: Path, device: str) -> None:
    """One rank: train a few steps and write what was held and sent. On "meta", the model is filled by the library."""
    import distributedtorch as dt
    from distributedtorch.core.world import here

    torch.set_num_threads(1)
    imported = resident()
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(layers=12, d=768, vocabulary=20480, length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model, optimizer = dt.distribute(model, optimizer)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gc.collect()
    ids = torch.randint(0, 20480, (1, 17))

    def step() -> None:
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dt.barrier()
    before, sent = counters(), sum(t.bytes_sent for t in here().comm.traffic.values())
    dt.barrier()
    for _ in range(STEPS):
        step()
    ours = (sum(t.bytes_sent for t in here().comm.traffic.values()) - sent) / STEPS
    dt.barrier()
    wire = (counters() - before) / STEPS / dt.world()
    held = here().loop.members[0].sync.bytes_held()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"psi": size, "held": held, "wire": wire, "counted": ours, "peak above imports": peak - imported}
    row["peak at the start"] = start - imported
    row["buckets"] = sorted({(c.span.stop - c.span.start) * 4 for c in here().loop.members[0].sync.collect.cells})  # type: ignore[attr-defined]
    (out / f"rank{dt.rank()}.json").write_text(json.dumps(row))


def formula(plan: str, psi: int, ranks: int) -> dict[str, float]:
    parts = {"ddp": (1, 1, 1), "zero1": (1, 1, ranks), "zero2": (1, ranks, ranks), "zero3": (ranks, ranks, ranks)}[plan]
    return {"parameters": psi / parts[0], "gradients": psi / parts[1], "optimizer": 2 * psi / parts[2]}


def wire_due(plan: str, psi: int, ranks: int) -> float:
    return (3 if plan == "zero3" else 2) * psi * (ranks - 1) / ranks


def verdicts(plan: str, ranks: int, row: dict[str, Any]) -> dict[str, bool]:
    due, bucket = formula(plan, row["psi"], ranks), max(row["buckets"])
    sent = wire_due(plan, row["psi"], ranks)
    return {
        **{kind: abs(row["held"][kind] - value) <= 0.05 * value + bucket for kind, value in due.items()},
        "wire": row["wire"] <= 1.01 * sent + 65536 and row["wire"] >= 0.99 * sent,
        "counters agree": abs(row["counted"] - row["wire"]) <= 0.01 * row["wire"] + 65536,
    }


def alone() -> None:
    """Enter a network namespace of this process's own, with its loopback up, its packets in order and sent once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare: run as root")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
    libc.mount(b"none", b"/", None, _PRIVATE, None)
    libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)  # the namespace's own interfaces
    Path("/sys/class/net/lo/queues/rx-0/rps_cpus").write_text(f"{(1 << os.cpu_count()) - 1:x}")
    Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.device)
        return 0
    alone()
    results, failed = [], 0
    for ranks in (2, 4):
        for plan in ("ddp", "zero1", "zero2", "zero3"):
            out = Path(f"/tmp/memory_wire-{os.getpid()}-{plan}-{ranks}")
            out.mkdir()
            command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(ranks), "--plan", plan]
            device = "meta" if plan == "zero3" else "cpu"
            command += [__file__, "--inside", str(out), "--device", device]
            environ = {**os.environ, "DISTRIBUTEDTORCH_SHARED": "0"}  # what goes through shared memory is on no wire
            subprocess.run(command, env=environ, check=True, capture_output=True)
            rows = [json.loads((out / f"rank{k}.json").read_text()) for k in range(ranks)]
            due = formula(plan, rows[0]["psi"], ranks)
            worst = {k: all(verdicts(plan, ranks, row)[k] for row in rows) for k in verdicts(plan, ranks, rows[0])}
            failed += not all(worst.values())
            row = max(rows, key=lambda r: r["peak above imports"])
            print(
                f"{plan:6} {ranks} ranks: MiB held { ({k: round(v / MIB, 1) for k, v in row['held'].items()}) } "
                f"due { ({k: round(v / MIB, 1) for k, v in due.items()}) } peak {row['peak above imports'] / MIB:.0f} "
                f"wire {row['wire'] / MIB:.2f} counted {row['counted'] / MIB:.2f} "
                f"due {wire_due(plan, row['psi'], ranks) / MIB:.2f} start {row['peak at the start'] / MIB:.0f} {worst}",
                flush=True,
            )
            results.append({"plan": plan, "ranks": ranks, "rows": rows, "due": due, "within": worst})
    written = {"machine": machine(), "steps": STEPS, "results": results}
    (ROOT / "benchmarks/results/memory_wire.json").write_text(json.dumps(written, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
