"""What a job leaves to other jobs of its hosts: whole GPUs, and memory of the devices it computes on.

`DISTRIBUTEDTORCH_RESERVE="devices=1,memory=8GiB"` on a host, or `dtorch run --reserve`:

- devices: the last so many GPUs are hidden from this process and from those it starts, when the library is imported.
- memory: from `dt.distribute` on, so much of every GPU that a model is on, or of the host where models are on the CPU,
  is not taken by the ranks together; each has an equal part of the rest. One that asks for more gets the error of an
  allocation that failed, before the kernel has to end some process of the host.

On the CPU the limit is the kernel's on a process's private memory (RLIMIT_DATA). It counts what is mapped, used or not.
It does not count what ranks share (buffers of their exchanges, parameters under `share`) nor the page cache; each
worker of a DataLoader has such a limit for itself; threads of libraries that get no memory may end the process without
an exception. On a GPU the limit is that of torch's allocator: the CUDA context of each process is not in it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distributedtorch.core.comm import Comm
from distributedtorch.core.errors import LaunchError, explain

RESERVE = "DISTRIBUTEDTORCH_RESERVE"
_HIDDEN = "DISTRIBUTEDTORCH_RESERVED_DEVICES"
"""How many GPUs of how many are hidden already, by this process or by one that started it, and their names."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FAILED = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "can't start new thread")
"""How torch, Python and the kernel say that memory was refused."""
_TO_BEGIN, _STACK = 256 << 20, 8 << 20
"""What a rank maps before it has trained anything (155 MiB were measured), and for each of its threads."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """What is left to others on a host."""

    devices: int = 0
    memory: int = 0
    """Bytes, of each device."""


_limited: dict[str, str] = {}
"""What is limited in this process, the host or a GPU by its UUID, and how that is said."""


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
        else:
            amount = int(value) if key == "devices" and value.isdecimal() else 0
        if not amount or key in found:
            needed = "devices= and a count, memory= and a number of MiB, GiB or TiB"
            do = "say devices=1,memory=8GiB, or one of the two"
            raise LaunchError(explain(f"{part!r} as what to leave to other jobs", needed, do))
        found[key] = amount
    return Reserve(**found)


def spoken() -> str:
    """What is left to others, for the printed line; empty where nothing is."""
    hidden = os.environ.get(_HIDDEN, "").partition(": ")[0]
    return ", ".join([*([f"{hidden} GPUs left to others"] if hidden else []), *_limited.values()])


def hide_devices() -> None:
    """Hide reserved GPUs, before anything opens CUDA; where a process that started this one did, the same ones.

    Raises:
        LaunchError: The request cannot be read, or leaves no device.
    """
    count = parse(os.environ.get(RESERVE, "")).devices
    if not count:
        return
    there = torch.cuda.device_count()  # by NVML, which opens nothing
    names = os.environ.get(_VISIBLE, ",".join(map(str, range(there)))).split(",")[:there]
    said, _, before = os.environ.get(_HIDDEN, "").partition(": ")
    if said.startswith(f"{count} of "):
        hidden = before.split(",")
    else:
        said, hidden = f"{count} of {there}", names[-count:]
    left = [name for name in names if name not in hidden]
    if not left or not there:
        given = f"{RESERVE} with devices={count} on a host where {there} GPUs are visible"
        raise LaunchError(explain(given, "one device or more that is left to use", "reserve fewer, or none"))
    os.environ[_VISIBLE] = ",".join(left)
    os.environ[_HIDDEN] = f"{said}: {','.join(hidden)}"


def keep(devices: Iterable[torch.device], comm: Comm, local_ranks: int) -> None:
    """Hold this rank to its part of what is not reserved, on every device from its first call on. A group call.

    Args:
        devices: Where its models are.
        comm: All ranks.
        local_ranks: How many of them this host has.

    Raises:
        LaunchError: The request leaves too little, or came too late for devices to be hidden.
    """
    asked = parse(os.environ.get(RESERVE, ""))
    if asked.devices:
        _check_hidden(asked.devices)
    used = {torch.device(device.type, device.index or 0) for device in devices} if asked.memory else set()
    if other := {device.type for device in used} - {"cuda", "cpu"}:
        given = f"{RESERVE} with memory= for a model on {', '.join(sorted(other))}"
        raise LaunchError(explain(given, "CUDA, or the CPU", "leave memory= out"))
    gpus = {str(torch.cuda.get_device_properties(one).uuid): one for one in used if one.type == "cuda"}
    mine = " ".join(gpus)
    everyone = [mine] if comm.alone else [raw.decode() for raw in comm.bytes_of_all("devices", mine.encode())]
    for name, device in gpus.items():
        if name not in _limited:
            _limited[name] = _limit_gpu(device, asked.memory, sum(name in one.split() for one in everyone))
    if any(device.type == "cpu" for device in used) and "host" not in _limited:
        _limited["host"] = _limit_host(asked.memory, local_ranks)
    if _limited and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def _check_hidden(count: int) -> None:
    given = f"{RESERVE} with devices={count}"
    if _HIDDEN not in os.environ:
        do = "set it where the script is started, or use dtorch run --reserve"
        raise LaunchError(explain(f"{given}, set after distributedtorch was imported", "set before", do))
    if torch.accelerator.device_count() != len(os.environ[_VISIBLE].split(",")):
        do = f"import distributedtorch first, or start with {_VISIBLE}={os.environ[_VISIBLE]}"
        raise LaunchError(explain(f"{given}, after this process has begun to use CUDA", "hidden before that", do))


def _limit_gpu(device: torch.device, kept: int, ranks: int) -> str:
    total = torch.cuda.mem_get_info(device)[1]
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    each = min((total - kept) // ranks, int(before * total))
    if each <= 0:
        raise LaunchError(_too_little(kept, total, each, ranks, "what a model takes"))
    torch.cuda.set_per_process_memory_fraction(each / total, device)
    return f"{_gib(kept)} of {device} left to others, {_gib(each)} for each rank"


def _limit_host(kept: int, ranks: int) -> str:
    if sys.platform != "linux":
        given = f"{RESERVE} with memory= on {sys.platform}"
        raise LaunchError(explain(given, "Linux, or models on a GPU", "leave memory= out"))
    import resource  # not there on Windows

    total, taken = _host_memory(), _mapped()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    there = min((limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), default=sys.maxsize)
    each = (total - kept) // ranks
    least = taken + _TO_BEGIN + _STACK * torch.get_num_threads()
    if each < least:
        raise LaunchError(_too_little(kept, total, each, ranks, f"{_gib(least)}: {_gib(taken)} are mapped already"))
    each = min(each, there)
    resource.setrlimit(resource.RLIMIT_DATA, (each, hard))
    return f"{_gib(kept)} of the host left to others, {_gib(each)} for each rank"


def _too_little(kept: int, total: int, each: int, ranks: int, needs: str) -> str:
    given = f"{RESERVE} with memory={_gib(kept)} of {_gib(total)}: {_gib(max(each, 0))} for each of {ranks} ranks"
    return explain(given, f"for each {needs}", "reserve less, or start fewer ranks")


def remark(error: BaseException) -> None:
    """Say beside a failed allocation what may have refused it."""
    refused = isinstance(error, MemoryError) or any(words in str(error) for words in _FAILED)
    if refused and _limited:
        error.add_note(f"  {RESERVE}: {', '.join(_limited.values())}")


class _Hook:
    """An excepthook that remarks first."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        remark(error)
        self.previous(kind, error, trace)


def _host_memory() -> int:
    """What this host has, or less where a control group that this process is in lets it take less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) << 10
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, kinds, path = line.split(":", 2)
        for group in (Path(path), *Path(path).parents):
            if number == "0":
                total = min(total, _limit(Path("/sys/fs/cgroup") / str(group).lstrip("/") / "memory.max"))
            elif "memory" in kinds.split(","):
                file = Path("/sys/fs/cgroup/memory") / str(group).lstrip("/") / "memory.limit_in_bytes"
                total = min(total, _limit(file))
    return total


def _limit(file: Path) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        text = ""
    return int(text) if text.isdecimal() else sys.maxsize


def _mapped() -> int:
    """Bytes of private memory that this process has mapped: what the kernel compares with the limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) << 10


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
