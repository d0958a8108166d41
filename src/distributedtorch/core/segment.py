"""Memory that the ranks of one host share, and the words in it by which they tell each other how far they are.

Each rank makes one segment (a sealed memfd: nothing is left of it when its processes are gone, however they end) and
maps those of the others. A segment is as large as the machine's memory, but only what is touched exists. Its owner
alone hands out blocks of it; a block is free again when no tensor uses it. In front lie lines of 64 bytes: only the
owner of a segment writes to its lines, everyone may read them. Whoever waits sleeps on the bells of all others (futex):
a word of each rank that changes with everything it says.

Order of stores: x86 keeps it; on other processors plain stores are not enough, so shared memory is not used there.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import PeerError

LINES = 1 << 13
_WORDS = 16
_FRONT = LINES * 2 * _WORDS * 4
"""Bytes before the first block: lines for exchanges, and lines for pieces on offer."""
_ALIGN = 4096
_BLAMED, _BELL = 0, 1
"""Words of line 0: the rank that ended first, as far as its owner knows; what the others sleep on."""
_FUTEX, _WAIT, _WAKE, _FUTEX_MANY, _WORD_32 = 202, 0, 1, 449, 2
_LOOKS = 100
"""Looks at a word before sleeping: about 15 us."""
_SECONDS_A_SLEEP, _SECONDS_TO_SUSPECT = 0.05, 0.4
_SECONDS_WITHOUT_BELLS = 0.0005
"""How long to sleep where the kernel knows no futex_waitv (before Linux 5.16)."""
MOST_RANKS = 128
"""As many bells can be slept on."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Bell(ctypes.Structure):
    """What the kernel calls futex_waitv: 32 bits wide, shared between processes."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("value", "at", "flags")]  # the last with 32 bits that are zero


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int]
_syscall.restype = ctypes.c_long
_NAP = _Time(0, int(_SECONDS_A_SLEEP * 1e9))


class Segment:
    """One rank's memory, as it lies in this process."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.fd = fd
        """By which others open it, or private views of it are made; to be closed when nobody will."""
        self.memory = mmap.mmap(fd, size)
        self._whole = memoryview(self.memory)  # tensors hold on to this, and it to the mapping
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words = self._whole[:_FRONT].cast("I")
        self.offsets = self._whole[:_FRONT].cast("Q")
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor over what lies at `offset`."""
        key = offset, numel, dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 1000:
                self._views.clear()
            found = torch.frombuffer(self._whole, dtype=dtype, count=numel, offset=offset)
            self._views[key] = found
        return found

    def close(self) -> None:
        """Nobody else will open it; what is mapped stays."""
        os.close(self.fd)

    def private(self, offset: int, size: int) -> mmap.mmap:
        """A view whose writes stay in this process."""
        return mmap.mmap(self.fd, size, flags=mmap.MAP_PRIVATE, offset=offset)


class Own(Segment):
    """This rank's segment: it hands out blocks."""

    def __init__(self) -> None:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _FRONT
        self.pid = os.getpid()
        fd = os.memfd_create("distributedtorch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self.token = secrets.token_bytes(16)
        self.memory[16:32] = self.token
        self._free = [(_FRONT, size - _FRONT)]
        """Offset and size of what is free, in order."""
        self._given: deque[tuple[int, int]] = deque()
        """What came free since: whoever drops the last tensor, in whatever thread, only adds to this."""
        self._lock = threading.Lock()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A block of zeros, with a storage of its own."""
        if not numel:
            return torch.zeros(0, dtype=dtype)
        size = -(-numel * dtype.itemsize // _ALIGN) * _ALIGN
        with self._lock:
            offset = self._take(size)
        block = (ctypes.c_char * size).from_buffer(self.memory, offset)
        weakref.finalize(block, self._give, offset, size).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=numel)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in this segment, if it does."""
        offset = tensor.data_ptr() - self.at
        return offset if _FRONT <= offset < self.size else None

    def _take(self, size: int) -> int:
        while self._given:
            self._absorb(*self._given.popleft())
        for k, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[k : k + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        raise MemoryError(f"{size >> 20} MiB asked of a segment as large as this machine's memory: too little is free")

    def _give(self, offset: int, size: int) -> None:
        """A block is used no more: its pages go back to the system, and come again as zeros."""
        if os.getpid() != self.pid:  # a forked process lets go of its view of it only
            return
        self.memory.madvise(mmap.MADV_REMOVE, offset, size)
        self._given.append((offset, size))

    def _absorb(self, offset: int, size: int) -> None:
        k = bisect.bisect(self._free, (offset, size))
        self._free.insert(k, (offset, size))
        for j in (k, k - 1):  # join neighbours
            if 0 <= j < len(self._free) - 1 and sum(self._free[j]) == self._free[j + 1][0]:
                self._free[j : j + 2] = [(self._free[j][0], self._free[j][1] + self._free[j + 1][1])]


class Board:
    """The lines of all ranks of this host: said by their owners, waited for by the others."""

    def __init__(
        self,
        rank: int,
        segments: Sequence[Segment],
        pids: Sequence[int],
        say: Callable[[str], None],
        names: Sequence[int],
    ) -> None:
        self.rank, self.segments, self.pids, self.say, self.names = rank, segments, pids, say, names
        self.mine = segments[rank]
        self.seconds_to_wait = 1800.0
        self.meanwhile: Callable[[], None] = lambda: None
        """Called before this rank sleeps, and whenever it was woken: others may need something of it."""
        self._others = [segment for k, segment in enumerate(segments) if k != rank]
        self._bells = _bells(self._others)
        self._watched = {os.pidfd_open(pid): k for k, pid in enumerate(pids) if k != rank}
        self._ends = select.poll()
        for fd in self._watched:
            self._ends.register(fd, select.POLLIN)
        self._stopped: set[int] = set()
        self._ringing = threading.Lock()
        self.whole = self
        """All ranks of this host, where this is a part of them."""

    def part(self, places: Sequence[int]) -> Board:
        """The same for some of the ranks: only their ends are the end of their exchanges, but all wake it."""
        pids, names = ([each[k] for k in places] for each in (self.pids, self.names))
        part = Board(places.index(self.rank), [self.segments[k] for k in places], pids, self.say, names)
        part.whole, part._ringing = self, self._ringing
        part._others, part._bells = self._others, _bells(self._others)
        return part

    def put(self, line: int, word: int, value: int) -> None:
        """Say how far this rank is, and wake who sleeps."""
        words = self.mine.words
        words[line * _WORDS + word] = value
        with self._ringing:
            words[_BELL] = (words[_BELL] + 1) & 0xFFFFFFFF
        _syscall(_FUTEX, self.mine.at + 4 * _BELL, _WAKE, 1 << 20, None, 0)

    def reached(self, peer: int, line: int, word: int, value: int) -> bool:
        """Whether a rank has said this much."""
        return (self.segments[peer].words[line * _WORDS + word] - value) & 0xFFFFFFFF < 1 << 31

    def wait(self, peer: int, line: int, word: int, value: int) -> None:
        """Return when a rank has said this much.

        Raises:
            PeerError: That rank, or another one, is gone.
        """
        for _ in range(_LOOKS):
            if self.reached(peer, line, word, value):
                return
        began = time.monotonic()
        while True:
            heard = [other.words[_BELL] for other in self._others]
            self.meanwhile()
            if self.reached(peer, line, word, value):
                return
            self._sleep(heard)
            waited = time.monotonic() - began
            if waited < _SECONDS_A_SLEEP:
                continue
            ended = [self._watched[fd] for fd, _ in self._ends.poll(0)]
            if self.reached(peer, line, word, value):  # who was waiting for the same may have ended since, in order
                return
            if ended:
                rank = self.whole._first(self.names[ended[0]])
                raise PeerError(f"rank {rank} is gone (its process has ended)", rank=rank)
            if waited > self.whole.seconds_to_wait:
                rank = self.names[peer]
                raise PeerError(f"rank {rank} has not come for {waited:.0f} s", rank=rank)
            if waited > _SECONDS_TO_SUSPECT:
                self.whole._name_stopped()

    def _sleep(self, heard: list[int]) -> None:
        """Until anybody says anything new, but not for long."""
        if len(heard) == 1:
            result = _syscall(_FUTEX, self._bells[0].at, _WAIT, heard[0], ctypes.addressof(_NAP), 0)
        else:
            for bell, value in zip(self._bells, heard, strict=True):
                bell.value = value
            until = time.monotonic_ns() + _NAP.nanoseconds
            limit = _Time(until // 10**9, until % 10**9)
            bells = ctypes.addressof(self._bells)
            result = _syscall(_FUTEX_MANY, bells, len(heard), 0, ctypes.addressof(limit), time.CLOCK_MONOTONIC)
        if result == -1 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            time.sleep(_SECONDS_WITHOUT_BELLS)

    def _name_stopped(self) -> None:
        """Name ranks that a signal holds; the first of the others speaks for all."""
        stopped = {rank for rank, pid in enumerate(self.pids) if is_stopped(pid)}
        first = min(rank for rank in range(len(self.pids)) if rank not in stopped)
        for rank in sorted(stopped - self._stopped) if first == self.rank else ():
            name, pid = self.names[rank], self.pids[rank]
            self.say(f"rank {name} is stopped (process {pid} got SIGSTOP): the others wait for it")
        self._stopped = stopped

    def blame(self, rank: int) -> None:
        """Say which rank ended first, before this one ends because of it."""
        self.mine.words[_BLAMED] = rank + 1

    def _first(self, ended: int) -> int:
        """The first cause: a rank that ended because another one had says so in its line."""
        for _ in self.segments:
            blamed = self.segments[self.names.index(ended)].words[_BLAMED] if ended in self.names else 0
            if not blamed:
                break
            ended = blamed - 1
        self.blame(ended)
        return ended


def _bells(segments: Sequence[Segment]) -> ctypes.Array[_Bell]:
    """What a rank sleeps on: the bells of others."""
    return (_Bell * len(segments))(*(_Bell(0, one.at + 4 * _BELL, _WORD_32) for one in segments))


def is_stopped(pid: int) -> bool:
    """Whether a process is held by a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b") ")[2][:1] in b"Tt"
    return False


def host() -> str:
    """What tells this host from others: containers with another network count as other hosts."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return " ".join((file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))))


def make() -> tuple[Own | None, dict[str, Any]]:
    """This rank's segment, and the card by which others of this host find it; or the reason why not."""
    try:
        if os.environ.get("DISTRIBUTEDTORCH_SHARED", "1") == "0":
            raise OSError("switched off by DISTRIBUTEDTORCH_SHARED=0")
        if platform.machine() not in ("x86_64", "AMD64"):
            raise OSError(f"on {platform.machine()} plain stores are not ordered")
        own = Own()
        return own, {"host": host(), "pid": os.getpid(), "fd": own.fd, "size": own.size, "token": own.token.hex()}
    except (OSError, ValueError, AttributeError) as error:
        return None, {"reason": str(error)}


def open_all(rank: int, own: Own, cards: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Map the segments of all ranks.

    Raises:
        OSError: One of them cannot be had.
    """
    opened: list[Segment] = []
    try:
        for k, card in enumerate(cards):
            opened.append(own if k == rank else _open(k, card))
    except BaseException:
        for other in opened:
            if other is not own:
                other.close()
        raise
    return opened


def _open(rank: int, card: Mapping[str, Any]) -> Segment:
    fd = os.open(f"/proc/{int(card['pid'])}/fd/{int(card['fd'])}", os.O_RDWR | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        if stat.st_uid != os.getuid() or stat.st_size != card["size"] or fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALS:
            raise OSError(f"the segment of rank {rank} is not what its card says")
        segment = Segment(fd, stat.st_size)
        if segment.memory[16:32] != bytes.fromhex(card["token"]):
            raise OSError(f"the segment of rank {rank} is another one")
    except BaseException:
        os.close(fd)
        raise
    return segment
