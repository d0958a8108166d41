"""A switch in user space: `switch.py SECONDS PORT PORT...` passes each frame on so many seconds after it came.

Stands in for the kernel's netem, which not every kernel has. Ports are interfaces of the network namespace it runs in.
Frames are taken and given with the kernel's notes about them (PACKET_VNET_HDR): checksums and segments that a sender
left to its network card stay left to it. Says "ready" when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL_PROTOCOLS = 263, 15, 23, 3
_RCVBUFFORCE = 33  # of SOL_SOCKET
_BYTES_NOTES, _BYTES_ADDRESS = 10, 6
_BYTES_FRAME, _BYTES_WAITING = 1 << 17, 1 << 25
_FRAMES_A_TURN = 64  # then the other ports have theirs


def open_port(name: str) -> socket.socket:
    """A socket that takes every frame which comes in at an interface, and gives frames out there."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setblocking(False)
    port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BYTES_WAITING)
    port.bind((name, _ALL_PROTOCOLS))
    return port


def frames(port: socket.socket) -> Iterator[bytes]:
    """What waits at a port; nothing where its cable is cut."""
    for _ in range(_FRAMES_A_TURN):
        try:
            yield port.recv(_BYTES_FRAME)
        except OSError:  # no more for now, or the link is down
            return


def addresses(frame: bytes) -> tuple[bytes, bytes]:
    """To whom a frame goes, and from whom."""
    middle = _BYTES_NOTES + _BYTES_ADDRESS
    return frame[_BYTES_NOTES:middle], frame[middle : middle + _BYTES_ADDRESS]


def serve(seconds: float, ports: Sequence[socket.socket]) -> None:
    """Hold and pass on, until standard input ends."""
    behind: dict[bytes, socket.socket] = {}  # address -> the port it was seen at
    held: deque[tuple[float, list[socket.socket], bytes]] = deque()  # in the order in which they are due
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready = select.select([sys.stdin, *ports], [], [], wait)[0]
        if sys.stdin in ready:
            return
        for port in ready:
            due = time.monotonic() + seconds
            for frame in frames(port):
                to, sender = addresses(frame)
                behind[sender] = port
                known = behind.get(to)
                held.append((due, [known] if known else [p for p in ports if p is not port], frame))
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, there, frame = held.popleft()
            for port in there:
                with contextlib.suppress(OSError):  # a cut cable, or a full queue: the frame is lost
                    port.send(frame)


def main() -> None:
    ports = [open_port(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    serve(float(sys.argv[1]), ports)


if __name__ == "__main__":
    main()
