"""What runs on the hosts of tests/test_bed.py.

- serve: says how many bytes a connection brought when it ends; on another port, gives every line back.
- copy ADDRESS BYTES: sends so many over TCP; prints the seconds until the other side has counted them, and its number.
- talk ADDRESS: for each line "SECONDS" on standard input, the seconds of a round trip on one connection, or "silent"
  where it takes longer than that.
- count: how many datagrams come until none does for a while.
- send ADDRESS NUMBER: sends so many datagrams.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import sys
import threading
import time

WHOLE, LINES, DATAGRAMS = 9000, 9001, 9002
SECONDS_SILENCE, SECONDS_START = 0.4, 20.0
_RCVBUFFORCE, _BYTES_WAITING = 33, 1 << 22  # all of a burst, however late the reader is


class Whole(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(str(len(self.rfile.read())).encode())


class Lines(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


def serve() -> None:
    for port, handler in ((WHOLE, Whole), (LINES, Lines)):
        server = socketserver.ThreadingTCPServer(("", port), handler)
        threading.Thread(target=server.serve_forever).start()
    print("ready", flush=True)


def copy(address: str, num_bytes: str) -> None:
    with socket.create_connection((address, WHOLE), timeout=SECONDS_START) as there:
        began = time.perf_counter()
        there.sendall(bytes(int(num_bytes)))
        there.shutdown(socket.SHUT_WR)
        counted = there.recv(100).decode()
        print(time.perf_counter() - began, counted)


def talk(address: str) -> None:
    there = socket.create_connection((address, LINES), timeout=SECONDS_START)
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heard = b""
    print("ready", flush=True)
    for number in itertools.count():
        if not (line := sys.stdin.readline()):
            return
        mine, began = f"<{number}>\n".encode(), time.perf_counter()
        until = began + float(line)
        there.sendall(mine)
        while mine not in heard and time.perf_counter() < until:
            there.settimeout(max(0.001, until - time.perf_counter()))
            try:
                heard += there.recv(1 << 16)
            except TimeoutError:
                break
        print(time.perf_counter() - began if mine in heard else "silent", flush=True)


def count() -> None:
    here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    here.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BYTES_WAITING)
    here.bind(("", DATAGRAMS))
    here.settimeout(SECONDS_START)
    print("ready", flush=True)
    for number in itertools.count():
        try:
            here.recv(100)
        except TimeoutError:
            print(number)
            return
        here.settimeout(SECONDS_SILENCE)


def send(address: str, num_datagrams: str) -> None:
    here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(int(num_datagrams)):
        here.sendto(b"x" * 16, (address, DATAGRAMS))


if __name__ == "__main__":
    {"serve": serve, "copy": copy, "talk": talk, "count": count, "send": send}[sys.argv[1]](*sys.argv[2:])
