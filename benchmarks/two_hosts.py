"""Two network namespaces as two hosts: one rank on each, started as torchrun, srun and mpirun would start them.

Each way ends with the weights of one process, and what listens beyond loopback is shown. torchrun is real; for srun and
mpirun their variables are set by hand, because neither can start processes in a namespace by itself. Needs root and
`ip`. `python benchmarks/two_hosts.py` prints one row per way and exits with the number of ways that failed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "tests" / "launch" / "train.py"
HOSTS = [f"dtorch-{os.getpid()}-{side}" for side in "ab"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
SECONDS = 120.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces joined by one cable; each sees only its own end."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "cable", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", host, "link", "set", link, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def torchrun(rank: int, out: Path) -> tuple[list[str], dict[str, str]]:
    options = f"--nnodes 2 --nproc-per-node 1 --node-rank {rank} --master-addr {ADDRESSES[0]} --master-port 29500"
    return ["-m", "torch.distributed.run", *options.split(), str(TRAIN), str(out)], {"GLOO_SOCKET_IFNAME": "cable"}


def srun(rank: int, out: Path) -> tuple[list[str], dict[str, str]]:
    environ = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
    environ |= {"SLURM_STEP_NODELIST": ",".join(ADDRESSES), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    return [str(TRAIN), str(out)], environ


def mpirun(rank: int, out: Path) -> tuple[list[str], dict[str, str]]:
    names = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    return [str(TRAIN), str(out)], environ | {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29501"}


def listeners() -> set[str]:
    """What listens on either host, by local address without the port."""
    found = set()
    for host in HOSTS:
        rows = subprocess.run(["ip", "netns", "exec", host, "ss", "-ltnH"], capture_output=True, text=True, check=True)
        found |= {row.split()[3].rpartition(":")[0] for row in rows.stdout.splitlines()}
    return found


def run(way: str, out: Path) -> tuple[set[str], str]:
    """Start one rank on each host; give what listened meanwhile, and what the ranks said if they failed."""
    ranks = []
    for rank, host in enumerate(HOSTS):
        command, environ = WAYS[way](rank, out)
        log = (out.parent / f"{way}.{rank}").open("w")
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                cwd=out.parent,
                stdout=log,
                stderr=log,
            )
        )
    seen: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        seen |= listeners()
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    bad = [rank.wait() for rank in ranks] != [0, 0]
    return seen, "".join((out.parent / f"{way}.{rank}").read_text() for rank in range(2)) if bad else ""


WAYS = {"torchrun": torchrun, "srun": srun, "mpirun": mpirun}


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as name, two_hosts():
        folder = Path(name)
        subprocess.run([sys.executable, TRAIN, folder / "one"], check=True, capture_output=True)
        one = load_file(folder / "one")
        for way in WAYS:
            seen, said = run(way, folder / f"weights.{way}")
            if said:
                failed += 1
                print(f"{way}: failed\n{said}")
                continue
            two = load_file(folder / f"weights.{way}")
            difference = max(float((two[key] - one[key]).abs().max()) for key in one)
            failed += not difference < 1e-12
            print(f"{way}: largest difference to one process {difference:.1e}; listened on {', '.join(sorted(seen))}")
    print(f"torch {torch.__version__}, {len(WAYS)} ways, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
