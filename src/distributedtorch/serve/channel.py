"""Between workers and a server: ZeroMQ with CURVE keys made for each job, headers of a fixed form, raw tensors.

A server knows the public keys of its workers and answers nobody else; a worker knows the server's. Nothing that comes
in is run or unpickled: a header of 40 bytes says what the rest is, and anything else is refused.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.errors import LaunchError, PeerError, explain, tell
from distributedtorch.serve.board import Refused

_HEADER = struct.Struct("<4sBBHIQqqI")
_MAGIC, _VERSION = b"DTSV", 1
_DOMAIN = "distributedtorch"
_BESIDE = 4096
"""Bytes of a message for headers, for what keeps it secret, and for the greeting of the smallest models' workers."""
_SECONDS_ALONE = 60.0
"""How long a server waits for workers whose connections are gone, and have not said that they are done."""
_SECONDS_TO_COME = 1800.0
"""How long it waits for the first one: as long as processes wait for each other anywhere."""
_SECONDS_TO_END = 1.0
"""How long it waits for workers that are gone when it was told to end."""
_SECONDS_TO_REPORT, _SECONDS_TO_REPEAT, _SECONDS_TO_PART = 8.0, 60.0, 15.0
_SECONDS_TO_ANSWER, _HEARTBEAT_MS, _LINGER_MS, _LONGEST_TEXT, _ALIGN = 30.0, 5000, 2000, 4096, 64
_MS_BETWEEN_LOOKS = 200


class Kind(IntEnum):
    """What a message says."""

    PULL = 1
    PUSH = 2
    LEAVE = 3
    BYE = 4
    STATE = 5
    REFUSED = 6
    FILL = 7
    ASK = 8


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message: its header's fields, and the bytes that follow."""

    kind: Kind
    worker: int
    step: int = -1
    version: int = -1
    serial: int = 0
    """Tells a worker's requests apart: the answer has that of the latest."""
    waiting: int = 0
    """In an answer: the pushes that wait at the server."""
    content: Tensor | None = None

    def frames(self) -> list[Any]:
        """As it is sent; tensors are not copied."""
        size = 0 if self.content is None else self.content.numel()
        waiting = min(self.waiting, 0xFFFF)
        head = _HEADER.pack(
            _MAGIC, _VERSION, self.kind, waiting, self.worker, size, self.step, self.version, self.serial
        )
        return [head] if self.content is None else [head, memoryview(self.content.numpy())]  # type: ignore[arg-type]


def read(frames: list[Any]) -> Message:
    """The message in some frames.

    Raises:
        Refused: They are none.
    """
    if not 1 <= len(frames) <= 2 or len(frames[0].buffer) != _HEADER.size:
        sizes = [len(frame.buffer) for frame in frames]
        raise Refused(f"not a message of this library: {len(sizes)} parts of {sizes} bytes, 1 or 2 needed")
    magic, version, kind, waiting, worker, size, step, at, serial = _HEADER.unpack(bytes(frames[0].buffer))
    if magic != _MAGIC or version != _VERSION or kind not in set(Kind):
        raise Refused(f"a message of another form (version {version}, kind {kind})")
    if size != (len(frames[1].buffer) if len(frames) == 2 else 0):
        raise Refused("a message that is not as long as it says")
    content = torch.frombuffer(frames[1].buffer, dtype=torch.uint8) if size else None
    if content is not None and content.data_ptr() % _ALIGN:
        content = content.clone()  # it lies in the socket's buffer
    return Message(
        kind=Kind(kind), worker=worker, step=step, version=at, serial=serial, waiting=waiting, content=content
    )


def zmq() -> Any:
    """The library, where it is installed with CURVE."""
    with contextlib.suppress(ImportError):
        import zmq as found

        if found.has("curve"):
            return found
    given = "no pyzmq with CURVE keys in this environment"
    raise LaunchError(explain(given, "pyzmq, for `server`", "pip install 'distributedtorch[server]'"))


def keys() -> tuple[bytes, bytes]:
    """A new pair: public, secret."""
    public, secret = zmq().curve_keypair()
    return public, secret


class _Ties:
    """The connections of a socket that stand; heartbeats end those whose other end does not answer.

    A worker's one counts when keys have been shown: the kernel of a process that is stopped takes connections, too.
    A server's count when they begin: those of strangers are ended where they come to nothing.
    """

    def __init__(self, socket: Any) -> None:
        self.zmq, self.socket, self.standing = zmq(), socket, set[int]()
        self.many = socket.type == self.zmq.ROUTER
        begun = self.zmq.EVENT_ACCEPTED if self.many else self.zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.ear = socket.get_monitor_socket(begun | self.zmq.EVENT_DISCONNECTED)

    def __bool__(self) -> bool:
        from zmq.utils.monitor import recv_monitor_message

        while self.ear.poll(0):
            event = recv_monitor_message(self.ear)
            if event["event"] == self.zmq.EVENT_DISCONNECTED:
                self.standing = self.standing - {event["value"]} if self.many else set()
            elif event["event"] != self.zmq.EVENT_MONITOR_STOPPED:
                self.standing.add(event["value"])
        return bool(self.standing)

    def close(self) -> None:
        """Look no more."""
        self.socket.disable_monitor()
        self.ear.close(0)


class Doors:
    """A server's end: who may come in is known by their keys."""

    def __init__(self, host: str, pair: tuple[bytes, bytes], workers: Mapping[bytes, int], largest: int) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self.zmq, self.workers = zmq(), dict(workers)
        self.context = self.zmq.Context()
        self.guard = ThreadAuthenticator(self.context)
        self.guard.start()
        self.guard.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        self.socket = self.context.socket(self.zmq.ROUTER)
        self.socket.curve_server, self.socket.linger = True, _LINGER_MS
        self.socket.curve_publickey, self.socket.curve_secretkey = pair
        self.socket.maxmsgsize, self.socket.rcvhwm = largest + _BESIDE, 4
        self.socket.heartbeat_ivl = _HEARTBEAT_MS
        self.socket.zap_domain = _DOMAIN.encode()
        self.ties, self.alone_since = _Ties(self.socket), float("inf")
        self.port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.names: dict[int, tuple[bytes, int]] = {}
        """By worker, what the socket calls it, and its latest request."""
        self.refused = 0
        """Messages that were none of a worker's."""
        self.ending = False
        """Whether it was told to end, and only sees its workers off."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether who has this public key may come in."""
        return key in self.workers

    def require_anybody(self) -> None:
        """Look whether there are workers at all.

        Raises:
            PeerError: Their connections have been gone for long, or none has come for longer.
        """
        now = time.monotonic()
        self.alone_since = float("inf") if self.ties else min(self.alone_since, now)
        limit = _SECONDS_TO_END if self.ending else _SECONDS_ALONE if self.names else _SECONDS_TO_COME
        if now - self.alone_since > limit:
            given = f"no worker has been connected to this server for {limit:g} s, and not all said goodbye"
            if not self.names:
                given = f"no worker has come to this server in {limit:g} s"
            do = "look at the workers' logs and their network"
            raise PeerError(explain(given, "workers that can be reached", do))

    def hear(self, milliseconds: int) -> Message | None:
        """The next message of a worker, if one comes."""
        if not self.socket.poll(milliseconds):
            return None
        name, *frames = self.socket.recv_multipart(copy=False)
        try:
            message = read(frames)
            owner = self.workers.get(str(frames[0].get("User-Id")).encode(), -1)
            if owner != message.worker:
                raise Refused(f"worker {message.worker} says what only worker {owner} may")
        except Refused as error:
            self.refused += 1
            self._send(bytes(name.buffer), refusal(error))
            return None
        self.names[message.worker] = bytes(name.buffer), message.serial
        return message

    def say(self, worker: int, message: Message) -> None:
        """Answer a worker."""
        name, serial = self.names[worker]
        self._send(name, replace(message, worker=worker, serial=serial))

    def _send(self, name: bytes, message: Message) -> None:
        self.socket.send_multipart([name, *message.frames()], copy=False)

    def close(self) -> None:
        """Stop listening."""
        self.guard.stop()
        self.ties.close()
        self.socket.close()
        self.context.term()


class Line:
    """A worker's end."""

    def __init__(
        self,
        worker: int,
        where: str,
        pair: tuple[bytes, bytes],
        server: bytes,
        *,
        number: int = 0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.zmq, self.worker, self.where, self.server = zmq(), worker, where, server
        self.name, self.tell = f"server {number} at {where}", tell or _tell
        self.context = self.zmq.Context()
        self.socket = self.context.socket(self.zmq.DEALER)
        self.socket.linger = _LINGER_MS
        self.socket.curve_serverkey = server
        self.socket.curve_publickey, self.socket.curve_secretkey = pair
        self.socket.heartbeat_ivl = _HEARTBEAT_MS
        self.ties = _Ties(self.socket)
        self.socket.connect(where)
        self.greeted, self.serial, self.version, self.waiting = False, 0, 0, 0
        self.told: tuple[float, bool] | None = None
        """When it was said last that no answer comes, and whether there was a connection then."""

    def say(self, kind: Kind, step: int = -1, content: Tensor | None = None, *, held: int = -1) -> None:
        """Send a message; `held`: the version that this worker has."""
        self.serial += 1
        self.last = Message(kind=kind, worker=self.worker, step=step, version=held, serial=self.serial, content=content)
        self._send()

    def _send(self) -> None:
        self.socket.send_multipart(self.last.frames(), copy=False)

    def hear(self, limit: float = float("inf")) -> Message:
        """The server's answer to the last message, which is sent again where none comes for long.

        Raises:
            Refused: The server says why not.
            PeerError: Nothing has ever come from there, the connection has been gone for long, or the limit is over.
        """
        begun = sent = time.monotonic()
        gone, again, self.told = float("inf"), min(_SECONDS_TO_ANSWER, limit / 5), None
        while True:
            if self.socket.poll(_MS_BETWEEN_LOOKS):
                message = self._answer()
                if message is not None:
                    return message
                continue
            now = time.monotonic()
            gone = float("inf") if self.ties else min(gone, now)
            self._require(now - begun, now - gone, limit)
            if now - sent >= again:
                self._send()  # a step counts once, however often it comes
                sent = now

    def _answer(self) -> Message | None:
        """A message that has come, if it is the answer."""
        self.greeted = True
        message = read(self.socket.recv_multipart(copy=False))
        if message.serial != self.serial:
            return None
        if message.kind is Kind.REFUSED:
            assert message.content is not None
            raise Refused(bytes(message.content.tolist()).decode(errors="replace"))
        self.version, self.waiting = message.version, message.waiting
        return message

    def _require(self, waited: float, gone: float, limit: float) -> None:
        """Look whether an answer may still come, and say where it takes long."""
        if not self.greeted and waited >= _SECONDS_TO_ANSWER:
            given = f"no answer from parameter {self.name} in {_SECONDS_TO_ANSWER:g} s"
            do = "look at the server's log; a worker of another job, or with another key, is not answered"
            raise PeerError(explain(given, "a server of this job that can be reached", do))
        if gone >= _SECONDS_TO_ANSWER or waited >= limit:
            given = f"parameter {self.name} has been out of reach for {min(waited, _SECONDS_TO_ANSWER):.3g} s"
            do = "look at the server's log (killed, stopped?) and the network"
            raise PeerError(explain(given, "a network that holds and a server that runs", do))
        stands = gone < 0
        due = self.told is None or self.told[1] != stands or waited > self.told[0] + _SECONDS_TO_REPEAT
        if waited >= _SECONDS_TO_REPORT and due and (not stands or self.worker < 2):
            self.told = waited, stands
            why = "it waits for other workers' pushes, or is busy" if stands else "there is no connection to it"
            self.tell(f"parameter {self.name} has not answered rank {self.worker} for {waited:.0f} s: {why}")

    def part(self) -> None:
        """After the goodbye: wait until the server has heard it; not for long."""
        with contextlib.suppress(Refused, PeerError):
            self.hear(_SECONDS_TO_PART)

    def close(self) -> None:
        """Hang up."""
        self.ties.close()
        self.socket.close()
        self.context.term()


def _tell(text: str) -> None:
    tell(f"distributedtorch: {text}")


def refusal(error: Exception) -> Message:
    """Why not, as a message."""
    text = bytearray(str(error).encode()[:_LONGEST_TEXT] or b"refused")
    return Message(kind=Kind.REFUSED, worker=0, content=torch.frombuffer(text, dtype=torch.uint8))
