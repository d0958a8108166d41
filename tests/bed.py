"""A bed of hosts: network namespaces on one switch, with a rate, a delay, loss and cables that can be cut.

    with Bed(hosts=2, rate="100mbit") as bed:
        ranks = [bed.popen(host, sys.executable, "train.py", env=environ(host, bed.address(0))) for host in range(2)]

A host is a network namespace with the interface `eth0`; a bridge in one more namespace joins them, so the machine's own
network is not touched. Each namespace is held by a process that ends with this one, however this one ends, and the
kernel then removes it with all its interfaces. Nothing has a name, so several beds can stand at once.

- `rate`: `tc tbf` on what each host sends.
- `cut`, `heal`: the host's port at the bridge is set down, up.
- `loss`: nftables drop packets at random where they arrive. The kernel hands over up to 64 KiB of a TCP stream as one
  packet here: a loss takes all of it.
- `delay`: the ports leave the bridge for a switch in user space (tests/switch.py). Not for throughput.

Needs root, iproute2, util-linux, and nftables for loss: `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

INTERFACE = "eth0"
ALWAYS, SOMETIMES = ("ip", "nsenter", "unshare"), ("tc", "nft")
"""Commands that every bed needs, and those that a rate and loss need."""
SECONDS = 60.0  # a guard against hangs, for what runs on a host
_SECONDS_CONFIGURE, _SECONDS_BETWEEN_LOOKS = 20.0, 0.002
_SWITCH = Path(__file__).with_name("switch.py")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS_BURST, _BYTES_BURST = 0.002, 70_000
"""At least what the kernel hands over as one packet: `tbf` would cut it up, a network card's work, with the time of the
processors that stand for both hosts (at 100 Mbit/s a tenth of them; the rate is the same to 0.1%)."""
_COLUMN_RECEIVED, _COLUMN_SENT = 0, 8  # of /proc/net/dev


def missing(*tools: str) -> str:
    """Why there can be no bed here, or none with these commands (all where none is given); empty where there can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in (*ALWAYS, *(tools or SOMETIMES)) if shutil.which(tool) is None]:
        return f"{', '.join(lacking)} not found: install iproute2, nftables and util-linux"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


class Bed:
    """Hosts 0 to `hosts` - 1, for the time of a `with` block; whatever still runs on them at its end is killed."""

    def __init__(self, hosts: int = 2, rate: str | None = None) -> None:
        self.num_hosts, self._first_rate = hosts, rate
        self._spaces: list[_Space] = []
        self._started: list[subprocess.Popen[Any]] = []
        self._limited = False
        self._slow: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bed:
        try:
            for _ in range(self.num_hosts + 1):
                self._spaces.append(_Space())
            self._lay_cables()
            self.rate(self._first_rate)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """Where the other hosts reach it."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *words: object) -> list[str]:
        """The words of a command that runs on a host; its process is the one that is started."""
        return self._spaces[host].within(*words)

    def run(
        self, host: int, *words: object, timeout: float = SECONDS, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; what it printed."""
        given = {"capture_output": True, "text": True, **options}
        return subprocess.run(self.command(host, *words), timeout=timeout, check=check, **given)

    def popen(self, host: int, *words: object, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        self._started.append(subprocess.Popen(self.command(host, *words), **options))
        return self._started[-1]

    def rate(self, rate: str | None) -> None:
        """Let each host send at most "20mbit" (or kbit, gbit); None: as fast as it can."""
        if rate is not None:
            change = f"replace dev {INTERFACE} root tbf rate {rate} burst {_burst(rate)} latency 50ms"
        elif self._limited:
            change = f"del dev {INTERFACE} root"
        else:
            return
        for space in self._hosts:
            space.configure(f"tc qdisc {change}")
        self._limited = rate is not None

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        self._bridge.configure(f"ip link set port{host} down")

    def heal(self, host: int) -> None:
        """Put it back."""
        self._bridge.configure(f"ip link set port{host} up")

    def loss(self, percent: float) -> None:
        """Lose so many of 100 packets, by chance, on each way; 0: none."""
        chain = "chain arriving { type filter hook input priority 0; "
        chain += f'iifname "{INTERFACE}" numgen random mod 10000 < {round(100 * percent)} drop; }}'
        rules = "add table ip bed; delete table ip bed;" + (f" table ip bed {{ {chain}\n}}" if percent else "")
        for space in self._hosts:
            space.configure("nft -f -", rules + "\n")

    def delay(self, seconds: float) -> None:
        """Let everything arrive so much later: a round trip takes twice that longer. 0: at once."""
        before, self._slow = self._slow, None
        if seconds:
            words = self._bridge.within(sys.executable, _SWITCH, seconds, *self._ports)
            self._slow = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._started.append(self._slow)
            _said(self._slow, "the switch")
        for port in self._ports:
            self._bridge.configure(f"ip link set {port} " + ("nomaster" if seconds else "master br0"))
        if before:
            before.kill()
            before.wait()

    def bytes_sent(self, host: int) -> int:
        """What a host's interface has counted since the bed was made; a packet of 64 KiB has one header there."""
        return self._spaces[host].counted(_COLUMN_SENT)

    def bytes_received(self, host: int) -> int:
        return self._spaces[host].counted(_COLUMN_RECEIVED)

    @property
    def _hosts(self) -> list[_Space]:
        return self._spaces[: self.num_hosts]

    @property
    def _bridge(self) -> _Space:
        return self._spaces[self.num_hosts]

    @property
    def _ports(self) -> list[str]:
        return [f"port{host}" for host in range(self.num_hosts)]

    def _lay_cables(self) -> None:
        bridge = self._bridge
        bridge.configure("ip link add br0 type bridge")
        bridge.configure("ip link set br0 up")
        for host, (space, port) in enumerate(zip(self._hosts, self._ports, strict=True)):
            bridge.configure(f"ip link add {port} type veth peer name {INTERFACE} netns {space.holder.pid}")
            bridge.configure(f"ip link set {port} master br0 up")
            space.configure(f"ip addr add {self.address(host)}/24 dev {INTERFACE}")
            space.configure(f"ip link set {INTERFACE} up")

    def _remove(self) -> None:
        for process in self._started:
            process.kill()  # before looking for the rest: one may not have entered its namespace yet
        for space in self._spaces:
            space.end()
        for process in self._started:
            process.wait()
            _close(process)
        self._spaces.clear()


class _Space:
    """A network namespace, and the process that holds it: it waits for a word that never comes, or for our end."""

    def __init__(self) -> None:
        hold = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"]
        self.holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _said(self.holder, "a network namespace")
        self.pin = os.open(f"/proc/{self.holder.pid}/ns/net", os.O_RDONLY)
        """Keeps the namespace's number from being given to another while we look for who is in it."""

    def within(self, *words: object) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *map(str, words)]

    def configure(self, command: str, text: str = "") -> None:
        done = subprocess.run(
            self.within(*command.split()),
            input=text,
            capture_output=True,
            text=True,
            timeout=_SECONDS_CONFIGURE,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")

    def counted(self, column: int) -> int:
        lines = Path(f"/proc/{self.holder.pid}/net/dev").read_text().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":")[1].split()[column])

    def processes(self) -> Iterator[int]:
        """Those in this namespace, ended ones not among them."""
        mine = os.fstat(self.pin)
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{name}/ns/net"), mine):
                    yield int(name)

    def end(self) -> None:
        while pids := list(self.processes()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self.holder.wait()
        _close(self.holder)
        os.close(self.pin)


def _said(process: subprocess.Popen[bytes], what: str) -> None:
    """Return when a process has said that it is ready."""
    assert process.stdout is not None
    if not process.stdout.readline():
        process.wait()
        _close(process)
        raise OSError(f"{what} could not be made: run as root, with iproute2 and util-linux")


def _close(process: subprocess.Popen[Any]) -> None:
    pipes: tuple[IO[Any] | None, ...] = (process.stdin, process.stdout, process.stderr)
    for pipe in pipes:
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not sent to a process that is gone
                pipe.close()


def _burst(rate: str) -> int:
    """Bytes that may go at once: what the rate gives in the time a busy machine may be late by."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)):
        raise ValueError(f"rate {rate!r} given\n  needed: a number with kbit, mbit or gbit\n  do: write 100mbit, say")
    return max(_BYTES_BURST, round(float(found[1]) * _UNITS[found[2]] / 8 * _SECONDS_BURST))
