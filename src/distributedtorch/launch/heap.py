"""What a rank that computes on the processor frees stays its own for the next step.

A step frees what it has computed and asks for the same again. glibc gives blocks of a MiB and more back to the kernel
in between, and the kernel then fills every page with zeros anew: a tenth of a step and more, in one process too. It is
told to keep what is freed: blocks of up to 32 MiB, its own limit. A rank then holds what its largest step needed until
it ends; before each fork free memory goes back, or the child would hold it too. Where the user has told malloc
anything, that stands; other allocators are left alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

KEEP = "DISTRIBUTEDTORCH_KEEP_MEMORY"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""malloc.h: how much may be free at the end of the heap, and from which size a block is mapped by itself."""
_NEVER, _LARGEST = -1, 32 << 20
_told: list[ctypes.CDLL] = []
"""glibc, once it was told."""


def keep_freed(env: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep what this process frees, from the first call on. Result: whether it does."""
    told = any(name.startswith("MALLOC_") for name in env) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    if _told or told or env.get(KEEP) == "0" or not (glibc := _glibc()):
        return bool(_told)
    if glibc.mallopt(_MMAP_THRESHOLD, _LARGEST) and glibc.mallopt(_TRIM_THRESHOLD, _NEVER):
        os.register_at_fork(before=lambda: glibc.malloc_trim(0))
        _told.append(glibc)
    return bool(_told)


def spoken() -> str:
    """That it does, for the printed line; empty where it does not."""
    return "freed memory kept" if _told else ""


def _glibc() -> ctypes.CDLL | None:
    """glibc, where memory comes from it."""
    try:
        glibc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    used, own = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (ctypes.CDLL(None), glibc))
    return glibc if used == own and hasattr(glibc, "gnu_get_libc_version") else None
