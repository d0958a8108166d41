"""Where the ranks of `mpirun` and `srun` meet: rank 0 hosts the store on one address, and the others learn its port.

On one host that is loopback: rank 0 binds a free port and leaves its number in a folder of mode 0700 that is named by
the job, where the others look for it. What an earlier job left there is told apart by the process that wrote it. Across
hosts it is the address of one interface, which gloo and NCCL are given too: Slurm tells the first host, and the port
follows from the step's number; mpirun tells neither, so the user gives `MASTER_ADDR` and `MASTER_PORT`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.launch import port as ports
from distributedtorch.launch import variables
from distributedtorch.launch.place import Place

_SECONDS_BETWEEN_LOOKS = 0.02
_MAX_BYTES = 4096
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DO = (
    "give every process the same MASTER_ADDR (rank 0's host) and MASTER_PORT: mpirun -x MASTER_ADDR=… -x MASTER_PORT=…"
)


def settle(place: Place, timeout_seconds: float) -> socket.socket | None:
    """Put where the ranks meet into MASTER_ADDR and MASTER_PORT; on rank 0 give the socket that listens there.

    Raises:
        LaunchError: No address is known, it is not of rank 0's host, or rank 0 did not come in time.
    """
    one_host = place.local_world == place.world
    name = os.environ.get("MASTER_ADDR") or _default_address(place, one_host=one_host)
    number = _given_port() or _default_port(place, one_host=one_host)
    address = _resolve(name)
    _name_interface(address, one_host=one_host)
    listener = None
    if place.rank == 0:
        listener = ports.listen(number, address)
        if number is None:
            number = listener.getsockname()[1]
            _leave(_folder(place), number)
        _say_exposure(address, number)
    elif number is None:
        number = _look(_folder(place), timeout_seconds)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = name, str(number)
    return listener


def forget(place: Place) -> None:
    """Remove what rank 0 left for the others, once all have joined."""
    if place.rank == 0:
        shutil.rmtree(_folder(place), ignore_errors=True)


def _default_address(place: Place, *, one_host: bool) -> str:
    if one_host:
        return "127.0.0.1"
    found = variables.slurm_address(os.environ) if place.launcher == "srun" else None
    if found is None:
        given = f"{place.world} processes by {place.launcher} on several hosts, and no MASTER_ADDR"
        raise LaunchError(explain(given, "an address to meet at", _DO))
    return found


def _given_port() -> int | None:
    text = os.environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise LaunchError(explain(f"MASTER_PORT={text!r}", "a number from 1 to 65535", "give a free port, or none"))
    return int(text)


def _default_port(place: Place, *, one_host: bool) -> int | None:
    """The port all come to by themselves; None: rank 0 takes a free one and leaves it for the others."""
    if one_host:
        return None
    if place.launcher == "srun":
        return variables.slurm_port(os.environ)
    given = f"{place.world} processes by {place.launcher} on several hosts, and no MASTER_PORT"
    raise LaunchError(explain(given, "a port to meet at", _DO))


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        given = f"{name} (where rank 0 should be) has no address here: {error.strerror}"
        raise LaunchError(explain(given, "a name that every host can resolve", _DO)) from None


def _name_interface(address: str, *, one_host: bool) -> None:
    """Tell gloo and NCCL which interface to use: the one that leads to rank 0, where the user has named none."""
    if one_host and ipaddress.ip_address(address).is_loopback:
        interface = "lo"
    elif ipaddress.ip_address(address).is_loopback:
        given = f"the address of rank 0 is {address} (loopback), but there are several hosts"
        raise LaunchError(explain(given, "an address that the other hosts can reach", _DO))
    else:
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def own_address(towards: str) -> str:
    """The address that this host has on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing: the kernel only chooses the way
        except OSError as error:
            given = f"no way from {socket.gethostname()} to {towards} ({error.strerror})"
            raise LaunchError(explain(given, "a network that all hosts are on", _DO)) from None
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str:
    """The name of the interface through which this host reaches an address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only chooses the way
        mine = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))[20:24] == mine:
                    return name
    given = f"no interface of {socket.gethostname()} leads to {address}"
    raise LaunchError(explain(given, "a network that all hosts are on", "set GLOO_SOCKET_IFNAME to its interface"))


def _say_exposure(address: str, number: int) -> None:
    if not ipaddress.ip_address(address).is_loopback:
        print(
            f"distributedtorch: the store listens at {address}:{number} without a key, and gloo and NCCL send clear "
            f"text on {os.environ['GLOO_SOCKET_IFNAME']}: keep that network private",
            file=sys.stderr,
        )


def _folder(place: Place) -> Path:
    return Path(tempfile.gettempdir()) / f"distributedtorch-{os.getuid()}-{place.job}"


def _leave(folder: Path, number: int) -> None:
    """Write the port down, for this user only; a folder that another user made is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        given = f"{folder} is there already and not this user's alone"
        raise LaunchError(explain(given, "a private folder", "remove it, or set MASTER_PORT to a free port"))
    note = {"port": number, "pid": os.getpid(), "began": variables.start_time(os.getpid())}
    part = folder / "port.part"
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(note, file)
    part.replace(folder / "port")


def _look(folder: Path, timeout_seconds: float) -> int:
    """The port rank 0 left, as soon as it is there."""
    found: list[int] = []
    if not _until(lambda: _read(folder, found), timeout_seconds):
        given = f"after {timeout_seconds:g} s rank 0 had not left its port in {folder}"
        do = "look at the output of rank 0; or set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port"
        raise LaunchError(explain(given, "rank 0 to call dt.distribute on this host", do))
    return found[0]


def _read(folder: Path, found: list[int]) -> bool:
    """Whether a rank 0 that still runs has left its port; what cannot be read is not there yet."""
    try:
        if not _is_private(folder):
            return False
        with open(os.open(folder / "port", os.O_RDONLY | os.O_NOFOLLOW)) as file:
            note = json.loads(file.read(_MAX_BYTES))
        if note["began"] and variables.start_time(int(note["pid"])) == note["began"]:
            found.append(int(note["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(found)


def _is_private(folder: Path) -> bool:
    status = os.stat(folder, follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o077 == 0


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True
