"""Ports, each at one address, never at all of them; bound before anything starts, so that a refusal is in words."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from distributedtorch.core.errors import LaunchError, explain

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_BACKLOG = 1024


def reserve(port: int | None, address: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a port (or a free one) from others, and does not listen: a process of the job's may."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((address, port or 0))
    except (OSError, OverflowError) as error:
        reserved.close()
        raise LaunchError(_refusal(port or 0, error, address)) from None
    return reserved


def listen(port: int, address: str) -> socket.socket:
    """A socket that listens on one address only."""
    listener = reserve(port, address)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_refusal(port, error, address)) from None
    return listener


def host(listener: socket.socket) -> Store:
    """The store of a run, on a listening socket that is already bound to one address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, number = listener.getsockname()
    return TCPStore(address, number, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _refusal(port: int, error: OSError | OverflowError, address: str) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        do = "set MASTER_ADDR to an address of the host that rank 0 runs on"
        return explain(f"{address} is no address of this host ({socket.gethostname()})", "rank 0's own address", do)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        pid = owner(port)
        by = f"by process {pid} ({_name(pid)})" if pid else "by a process of another user"
        return explain(f"port {port} is in use {by}", "a free port", "leave --port out to take a free one, or end it")
    reason = error.strerror if isinstance(error, OSError) else "not a port"
    return explain(f"port {port}: {reason}", "a port from 1024 to 65535", "leave --port out to take a free one")


def owner(port: int) -> int | None:
    """The process that listens at a port, where /proc shows it."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) in inodes:
                        return int(folder.name)
    return None


def _listening(table: Path, port: int) -> list[str]:
    """The sockets of a kernel table that listen at a port, as /proc/<pid>/fd spells them."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended meanwhile"
