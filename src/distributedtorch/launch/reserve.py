"""What a job leaves to other jobs of its hosts: whole devices, and memory of those it computes on.

`DISTRIBUTEDTORCH_RESERVE="devices=1,memory=8GiB"` on a host, or `dtorch run --reserve`, read at import:

- devices: the last so many GPUs of the host are hidden from this process and from those it starts.
- memory: so much of every GPU in use, or of the host where ranks compute on the CPU, is not taken. What is left is
  divided by the ranks there. A rank that asks for more gets the error of an allocation that failed, in which its script
  can still save; nothing is killed.

On the CPU the limit is the kernel's on private memory (RLIMIT_DATA): memory that is mapped counts, used or not; what
ranks share, and the page cache, do not; each worker of a DataLoader has such a limit for itself. On a GPU it is the
allocator's of torch: the CUDA context, a few hundred MiB a process, is not in it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.core.world import accelerator
from distributedtorch.launch.place import Place

RESERVE = "DISTRIBUTEDTORCH_RESERVE"
_HIDDEN = "DISTRIBUTEDTORCH_RESERVED_DEVICES"
"""Set where devices are hidden already, by this process or by the one that started it: how many of how many."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FAILED = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "can't start new thread")
"""How torch, Python and the kernel say that memory was refused."""
_TO_BEGIN = 256 << 20
"""What a rank maps, beside what it has after the import, before it has trained anything (155 MiB were measured)."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """What is left to others on a host."""

    devices: int = 0
    memory: int = 0
    """Bytes, of each device in use."""


@dataclass(kw_only=True)
class _Held:
    """What holds in this process."""

    said: str = ""
    """For the printed line, and beside an allocation that failed."""


_held = _Held()


def spoken() -> str:
    """What is left to others, for the printed line; empty where nothing is."""
    hidden = os.environ.get(_HIDDEN, "")
    return ", ".join(filter(None, [f"{hidden} GPUs left to others" if hidden else "", _held.said]))


def hide_devices() -> None:
    """Hide reserved GPUs, before anything asks CUDA which there are. Once, also over processes that start others.

    Raises:
        LaunchError: The request cannot be read, or leaves no device, or comes too late.
    """
    count = parse(os.environ.get(RESERVE, "")).devices
    if not count or _HIDDEN in os.environ:
        return
    there = torch.cuda.device_count()  # by NVML: CUDA itself would look only once
    if count >= there:
        given = f"{RESERVE} with devices={count} on a host where {there} GPUs are visible"
        raise LaunchError(explain(given, "one device or more that is left to use", "reserve fewer, or none"))
    names = os.environ.get(_VISIBLE, ",".join(map(str, range(there)))).split(",")
    left = ",".join(names[: there - count])
    os.environ[_VISIBLE] = left
    if torch.cuda.is_initialized() or torch.cuda.device_count() != there - count:
        given = f"{RESERVE} with devices={count}, after this process has begun to use CUDA"
        raise LaunchError(explain(given, "import distributedtorch first", f"do so, or start with {_VISIBLE}={left}"))
    os.environ[_HIDDEN] = f"{count} of {there}"


def limit_memory(place: Place) -> None:
    """Hold this rank to its part of what is not reserved.

    Raises:
        LaunchError: The request cannot be read, or leaves too little.
    """
    kept = parse(os.environ.get(RESERVE, "")).memory
    if not kept:
        return
    kind = accelerator()
    if kind == "cpu":
        _limit_host(kept, place.local_world)
    elif kind == "cuda":
        _limit_gpu(kept, place)
    else:
        given = f"{RESERVE} with memory= on a host that computes on {kind}"
        raise LaunchError(explain(given, "CUDA, or the CPU", "leave memory= out there"))
    sys.excepthook = _hook(sys.excepthook)


def _limit_host(kept: int, ranks: int) -> None:
    import resource  # not there on Windows

    total = _host_memory()
    each, taken = (total - kept) // ranks, _mapped()
    if each < taken + _TO_BEGIN:
        needs = f"at least {_gib(taken + _TO_BEGIN)}, without a model"
        raise LaunchError(_too_little(kept, total, each, ranks, needs))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (each if hard == resource.RLIM_INFINITY else min(each, hard), hard))
    _held.said = f"{_gib(kept)} of the host left to others, {_gib(each)} for each rank"


def _limit_gpu(kept: int, place: Place) -> None:
    device, count = torch.cuda.current_device(), torch.cuda.device_count()
    total = torch.cuda.mem_get_info(device)[1]
    ranks = len(range(device, place.local_world, count)) or 1
    each = (total - kept) // ranks
    if each <= 0:
        raise LaunchError(_too_little(kept, total, each, ranks, "what a model takes"))
    torch.cuda.set_per_process_memory_fraction(each / total, device)
    _held.said = f"{_gib(kept)} of each GPU left to others, {_gib(each)} for each rank"


def _too_little(kept: int, total: int, each: int, ranks: int, needs: str) -> str:
    given = f"{RESERVE} with memory={_gib(kept)} of {_gib(total)}: {_gib(max(each, 0))} for each of {ranks} ranks"
    return explain(given, f"for each {needs}", "reserve less, or start fewer ranks")


def parse(text: str) -> Reserve:
    """What a request says: `devices=1`, `memory=8GiB`, or both.

    Raises:
        LaunchError: It says something else.
    """
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, _, value = part.partition("=")
        size = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB|TiB)", value) if key == "memory" else None
        if size:
            amount = int(float(size[1]) * _UNITS[size[2]])
        elif key == "devices" and value.isdecimal():
            amount = int(value)
        else:
            amount = 0
        if not amount or key in found:
            do = f"write {RESERVE}=devices=1,memory=8GiB, or one of the two"
            raise LaunchError(explain(f"{part!r} in {RESERVE}", "devices= and a count, memory= and MiB or GiB", do))
        found[key] = amount
    return Reserve(**found)


def remark(error: BaseException) -> None:
    """Say beside a failed allocation what may have refused it."""
    refused = isinstance(error, MemoryError) or any(words in str(error) for words in _FAILED)
    said = f"  {RESERVE}: {_held.said}"
    if refused and _held.said and said not in getattr(error, "__notes__", []):
        error.add_note(said)


def _hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        remark(error)
        previous(kind, error, trace)

    return hook


def _host_memory() -> int:
    """What this host has, or what its control group lets this job take."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) << 10
    for group in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(group)
        text = limit.read_text().strip() if limit.exists() else ""
        total = min(total, int(text)) if text.isdecimal() else total
    return total


def _mapped() -> int:
    """Bytes of private memory that this process has mapped: what the kernel compares with the limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) << 10


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
