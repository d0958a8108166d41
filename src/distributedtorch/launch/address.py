"""Where ranks that no supervisor of ours has started meet.

On one host that is a folder of their user's (`folder`): rank 0 makes it and leaves its name in another one, of mode
0700 and named by the job, where the others look for it. What an earlier job left there is told apart by the process
that wrote it. Across hosts rank 0 of `mpirun` and `srun` hosts a store at the address of one interface, which gloo and
NCCL are given too: Slurm tells the first host, and the port follows from the step's number; mpirun tells neither, so
the user gives `MASTER_ADDR` and `MASTER_PORT`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.launch import folder as folders
from distributedtorch.launch import port as ports
from distributedtorch.launch import private, secret, variables
from distributedtorch.launch.place import Place

_SECONDS_BETWEEN_LOOKS = 0.02
_MAX_BYTES = 4096
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DO = (
    "give every process the same MASTER_ADDR (rank 0's host) and MASTER_PORT: mpirun -x MASTER_ADDR=… -x MASTER_PORT=…"
)


def on_one_host(place: Place) -> bool:
    """Whether all ranks are on this host, as far as the starter tells; one that tells nothing is not taken for it."""
    if place.local_world != place.world:
        return False
    return place.launcher != "torchrun" or "LOCAL_WORLD_SIZE" in os.environ


def meet(place: Place, timeout_seconds: float) -> bool:
    """Put the folder in which all ranks meet into the environment, if they can: they are on one host.

    Raises:
        LaunchError: Rank 0 did not come in time, or the folder of its note is not this user's alone.
    """
    started = place.job or "TORCHELASTIC_RUN_ID" in os.environ
    if not on_one_host(place) or not started or (place.launcher != "torchrun" and os.environ.get("MASTER_PORT")):
        return False
    if place.rank == 0:
        path, held = folders.make()
        atexit.register(forget, place)
        _leave(_folder(place), path)
    else:
        path, held = _look(_folder(place), timeout_seconds)
    atexit.register(folders.leave, path, held)
    _name_loopback()
    os.environ[folders.VARIABLE] = str(path)
    return True


def settle(place: Place) -> socket.socket | None:
    """Put where ranks of several hosts meet into MASTER_ADDR and MASTER_PORT; on rank 0 the socket that listens there.

    Raises:
        LaunchError: No address is known, or it is not of rank 0's host.
    """
    one_host = on_one_host(place)
    name = os.environ.get("MASTER_ADDR") or _default_address(place, one_host=one_host)
    number = _given_port() or _default_port(place)
    address = _resolve(name)
    _name_interface(address, one_host=one_host)
    listener = ports.listen(number, address) if place.rank == 0 else None
    if listener is not None:
        _say_exposure(address, number)
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


def _default_port(place: Place) -> int:
    """The port all come to by themselves."""
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
        return _name_loopback()
    if ipaddress.ip_address(address).is_loopback:
        given = f"the address of rank 0 is {address} (loopback), but there are several hosts"
        raise LaunchError(explain(given, "an address that the other hosts can reach", _DO))
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _name_loopback() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


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
            f"distributedtorch: the store listens at {address}:{number} {secret.spoken()}, and gloo and NCCL send "
            f"clear text on {os.environ['GLOO_SOCKET_IFNAME']}: keep that network private",
            file=sys.stderr,
        )


def _folder(place: Place) -> Path:
    job = place.job
    if not job:  # torchrun's, whose restarts are jobs of their own
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        job = variables.as_file_name("-".join(["torchrun", *(os.environ.get(name, "") for name in names)]))
    return Path(tempfile.gettempdir()) / f"distributedtorch-{os.geteuid()}-{job}"


def _leave(folder: Path, meeting: Path) -> None:
    """Write down where the ranks meet, for this user only; a folder that another user made is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not private.is_private(folder):
        given = f"{folder} is there already and not this user's alone"
        raise LaunchError(explain(given, "a private folder", "remove it, or set TMPDIR to a folder of your own"))
    note = {"meet": str(meeting), "pid": os.getpid(), "began": variables.start_time(os.getpid())}
    part = folder / "note.part"
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(note, file)
    part.replace(folder / "note")


def _look(folder: Path, timeout_seconds: float) -> tuple[Path, int]:
    """Where rank 0 meets the others, as soon as it has said so, and what holds that folder."""
    found: list[tuple[Path, int]] = []
    if not _until(lambda: _read(folder, found), timeout_seconds):
        given = f"after {timeout_seconds:g} s rank 0 had not left its note in {folder}"
        do = "look at the output of rank 0, and whether it has the same TMPDIR; or set MASTER_PORT to a free port"
        raise LaunchError(explain(given, "rank 0 to call dt.distribute on this host", do))
    return found[0]


def _read(folder: Path, found: list[tuple[Path, int]]) -> bool:
    """Whether a rank 0 that still runs has left its note; what cannot be read is not there yet."""
    try:
        if not private.is_private(folder):
            return False
        with open(os.open(folder / "note", os.O_RDONLY | os.O_NOFOLLOW)) as file:
            note = json.loads(file.read(_MAX_BYTES))
        if note["began"] and variables.start_time(int(note["pid"])) == note["began"]:
            path = Path(note["meet"])
            held = folders.hold(path)
            found += [] if held is None else [(path, held)]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(found)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True
