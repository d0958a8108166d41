"""Memory that exists once per host: its ranks look at the same pages until one of them writes there.

`truth` is the memory itself, in the segment of the host's first rank; only the owner of a range writes to it, and only
while nobody looks. `seen` is a private view of the same pages, for tensors that users get: what a rank writes there, by
whatever way, the kernel puts into copies of those pages that are this rank's own. So an edit acts as where every rank
has memory to itself. The kernel's record of pages (/proc/self/pagemap) tells of such copies, even of writes that torch
does not count (`p.data`), and they are dropped when the edit has gone into the truth.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

import torch

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import UsageError, explain

_PAGE = mmap.PAGESIZE
_FILE, _SWAPPED = 1 << 61, 1 << 62
"""Bits of a page in the record: it is one of a file's, not a copy; it is swapped out. The sign: it is present."""


class Once:
    """Blocks of such memory, made and closed together: both are group calls."""

    def __init__(self, comm: Comm, name: str, blocks: Sequence[tuple[int, torch.dtype]]) -> None:
        assert comm.shared is not None
        self.comm, self.name, self.shared = comm, name, comm.shared
        ends = list(accumulate((-(-numel * dtype.itemsize // _PAGE) * _PAGE for numel, dtype in blocks), initial=0))
        size = ends[-1] + _PAGE  # no values lie in the last one: to try the record of pages
        first = comm.hosts.near[0] if comm.hosts is not None else 0
        self._block = self.shared.own.zeros(size if comm.rank == first else 0, torch.uint8)
        offset = int(comm.exchange(f"{name}/where", torch.tensor([self.shared.own.offset_of(self._block) or 0]))[first])
        memory = self.shared.segments[0]
        self.truth = [memory.view(offset + at, *block) for at, block in zip(ends, blocks, strict=False)]
        self._private = memory.private(offset, size)
        self._pages = torch.frombuffer(memoryview(self._private), dtype=torch.uint8)
        self._places = list(zip(ends, blocks, strict=False))
        self.look()
        self._try()
        self.shared.kept.append(self._block)  # to the end of the process, if not closed: others may look at it

    def look(self) -> None:
        """Let `seen` be tensors over the mapping."""
        pages = memoryview(self._private)  # tensors hold on to this, and it to the mapping
        self.seen = [
            torch.frombuffer(pages, dtype=dtype, count=numel, offset=at) if numel else torch.zeros(0, dtype=dtype)
            for at, (numel, dtype) in self._places
        ]

    def moved(self) -> bool:
        """Whether torch has given `seen` other memory: it does that to share tensors with a process of the user's."""
        base = self._pages.data_ptr()
        pairs = zip(self.seen, self._places, strict=True)
        return any(seen.numel() and seen.data_ptr() != base + at for seen, (at, _) in pairs)

    def edited(self) -> int:
        """How many bytes of pages this rank has written to."""
        count = self._pages.numel() // _PAGE
        found = os.pread(_record(), 8 * count, self._pages.data_ptr() // _PAGE * 8)
        pages = torch.frombuffer(bytearray(found), dtype=torch.int64)
        copies = ((pages < 0) | (pages & _SWAPPED != 0)) & (pages & _FILE == 0)
        return int(copies.sum()) * _PAGE

    def forget(self) -> None:
        """Drop what this rank has written: it sees the truth again."""
        self._private.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give the memory back; whatever still looks at `seen` keeps what it sees, in copies of this rank's own."""
        self._pages[::_PAGE].add_(0)
        self.comm.barrier(f"{self.name}/closed")
        self.shared.kept = [kept for kept in self.shared.kept if kept is not self._block]
        del self._block, self.truth

    def _try(self) -> None:
        """Make sure that writes are seen here: else edits would be lost in silence."""
        before = self.edited()
        self._pages[-1] = 1
        after = self.edited()
        self.forget()
        if before or not after or self.edited() or self._pages[-1] != 0:
            given = "`share`, where the system does not tell which pages a process has written (/proc/self/pagemap)"
            needed = "that record: edits of parameters would be lost without it"
            raise UsageError(explain(given, needed, "leave `share` out of the plan"))


@functools.cache
def _record() -> int:
    """The kernel's record of this process's pages."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def refusal(comm: Comm, device: torch.device) -> str:
    """Why memory cannot exist once per host here; empty where it can."""
    if comm.shared is None:
        return f"the ranks share no memory ({comm.unshared})"
    if device.type != "cpu":
        return f"parameters are on {device}"
    if not os.access("/proc/self/pagemap", os.R_OK):
        return "the system keeps its record of pages to itself (/proc/self/pagemap)"
    return ""
