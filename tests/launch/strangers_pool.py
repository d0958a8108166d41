"""What each rank of a job does while another user attacks it: rank 0 forks that user, and prints what came of it.

Usage: strangers_pool [open]: with the filter left out on what listens for zero3, so that the attack must be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import distributedtorch as dt
from distributedtorch.core import listeners
from distributedtorch.launch.join import client

NOBODY = 65534
FLOOD = 300
_TABLES = ("tcp", "tcp6")


def listening(pids: set[int]) -> dict[str, int]:
    """The TCP listeners of these processes, as /proc has them: address, with the process."""
    ours: dict[str, int] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                ours[os.readlink(link)] = pid
    rows = [line.split() for table in _TABLES for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    found = [(row[1], ours.get(f"socket:[{row[9]}]")) for row in rows if row[3] == "0A"]
    return {address: pid for address, pid in found if pid is not None}


def unix(pids: set[int]) -> list[str]:
    """The Unix sockets of these processes at which connections are taken."""
    ours = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[-1] for row in rows if int(row[3], 16) & 0x10000 and f"socket:[{row[6]}]" in ours]


def is_loopback(address: str) -> bool:
    return address.startswith(("0100007F:", "0000000000000000FFFF00000100007F:", f"{'0' * 24}01000000:"))


def attack(ports: list[int], folder: str) -> dict[str, object]:
    """As another user: connect to everything many times, stay silent, and try the folder."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    sockets = list(tries(ports))
    time.sleep(0.3)  # for handshakes, and for the others to take what comes
    connected = {port for port, one in sockets if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and up(one)}
    entered = []
    for name in (folder, f"{folder}/lock", f"{folder}/groups", f"/proc/{os.getppid()}/fd/0"):
        with contextlib.suppress(PermissionError):
            os.close(os.open(name, os.O_RDONLY))
            entered.append(name)
    with contextlib.suppress(PermissionError):
        Path(folder, "stranger").write_text("")
        entered.append("stranger")
    return {"connected": sorted(connected), "entered": entered}


def tries(ports: list[int]) -> Iterator[tuple[int, socket.socket]]:
    for port in ports * FLOOD:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        yield port, one


def up(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def main() -> None:
    if sys.argv[1:] == ["open"]:
        listeners._close_to_all = lambda descriptor: None
    model = torch.nn.Linear(2, 1)
    model, optimizer = dt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")
    store = client()
    store.set(f"pid/{dt.rank()}", str(os.getpid()))
    if dt.is_main():
        ranks = {int(store.get(f"pid/{rank}")) for rank in range(dt.world())}
        there, (read, write) = listening({*ranks, os.getppid()}), os.pipe()
        ports = [int(address.rpartition(":")[2], 16) for address in there]
        files = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in ranks}
        child = os.fork()
        if not child:
            os.write(write, json.dumps(attack(ports, os.environ["DISTRIBUTEDTORCH_MEET"])).encode())
            os._exit(0)
        found = json.loads(os.read(read, 1 << 16))
        os.waitpid(child, 0)
        found["ports"], found["supervisor"] = ports, [pid for pid in there.values() if pid not in ranks]
        found["loopback"] = all(map(is_loopback, there))
        found["unix"] = unix({*ranks, os.getppid()})
        found["files"] = max(len(os.listdir(f"/proc/{pid}/fd")) - count for pid, count in files.items())
        print(json.dumps(found), flush=True)
    dt.barrier()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2, "the script's own collectives work as before"


if __name__ == "__main__":
    main()
