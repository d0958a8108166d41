"""What this process listens with, closed to all once those who were meant to come have come.

gloo opens one listener per process group, and needs it only while the ranks connect to each other. It cannot be told to
close it; a filter of the kernel's drops whatever comes later, so that nobody else gets a connection of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0: keep no byte of any packet
_MOST_FILES = 1 << 16


@contextlib.contextmanager
def sealed(*, also_nccl: bool = False) -> Iterator[None]:
    """A block in which process groups are made: nobody can connect to what they listen with, once it has ended.

    `also_nccl`: NCCL connects in it too, and goes on listening; nothing is closed then.
    """
    before = _listening()
    yield
    if also_nccl or os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("0", "false", "n", "no", "off"):
        return  # ranks connect later
    for name in _listening() - before:
        _close_to_all(name[0])


def allow_many_files() -> None:
    """Let this process have as many files open as it may: connections of strangers must not use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listening() -> set[tuple[int, str]]:
    """The descriptors at which TCP connections are taken, with what tells each from a later one of its number.

    Python's own sockets, of a server in another thread, say, are not among them: only gloo's go to child processes.
    """
    found: set[tuple[int, str]] = set()
    if not sys.platform.startswith("linux"):
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:") and os.get_inheritable(int(name)) and _listens(int(name)):
                found.add((int(name), link))
    return found


def _listens(descriptor: int) -> bool:
    there = socket.socket(fileno=descriptor)
    try:
        internet = there.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bool(there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        there.detach()


def _close_to_all(descriptor: int) -> None:
    rule = ctypes.create_string_buffer(_DROP, len(_DROP))
    there = socket.socket(fileno=descriptor)
    try:
        with contextlib.suppress(OSError):  # a kernel without filters: it listens on, as before
            there.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(rule)))
    finally:
        there.detach()
