"""The GPU memory of other ranks of this host, read where it lies: through no host memory, and nobody is asked.

CUDA's interprocess handles name memory and events. Copies are made by the GPU's copy engines on a stream of their own,
in an order that events keep and no host waits for: a copy begins after its owner's `written` event, recorded when the
values were made; an owner writes again after the `read` events of all others, recorded at a fence.

Run on one GPU with several ranks. Ranks with a GPU each need peer access between them; where anything is refused,
pieces go through host memory as before, and the printed line says why.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
from torch import Tensor

from distributedtorch.core.comm import Comm

_HANDLE_BYTES = 64
CARD_BYTES = _HANDLE_BYTES + 8
"""A card: the handle of an allocation, and where in it a piece begins."""
_LAZY_PEER_ACCESS = 1
_TOKEN = 0x64746F726368


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class Reach:
    """The ranks of this host by their GPU memory. Made and closed by all ranks together."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm
        self.driver = _driver()
        self.stream = torch.cuda.Stream(device)
        """Copies from other ranks."""
        self.written, self.read = (torch.cuda.Event(interprocess=True) for _ in range(2))
        self.token = torch.tensor([_TOKEN], device=device)
        self.peers: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        """By rank, when what it offers was written, and when it had read what others offer."""
        self._opened: dict[bytes, int] = {}
        self._cards: dict[int, tuple[Tensor, Tensor]] = {}
        self._outdated: list[tuple[Tensor, Tensor]] = []
        """Pieces and cards that ranks may still look at which have not come to a newer edition."""

    def introduce(self) -> dict[str, str]:
        """What other ranks need to find this one's memory."""
        self.written.record()
        self.read.record()
        torch.cuda.current_stream().synchronize()
        events = {"written": self.written.ipc_handle().hex(), "read": self.read.ipc_handle().hex()}
        return {**events, "token": self._card(self.token).hex()}

    def meet(self, rank: int, card: dict[str, str]) -> None:
        """Open a rank's events, and try to read its memory.

        Raises:
            OSError: That cannot be done.
        """
        events = [
            torch.cuda.Event.from_ipc_handle(self.token.device, bytes.fromhex(card[name]))
            for name in ("written", "read")
        ]
        self.peers[rank] = events[0], events[1]
        found = torch.zeros_like(self.token)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.copy(rank, bytes.fromhex(card["token"]), found)
        self.stream.synchronize()
        if found.item() != _TOKEN:
            raise OSError(f"the GPU memory of rank {rank} reads as something else")

    def card(self, number: int, piece: Tensor) -> Tensor:
        """Where a piece lies, in memory that the ranks of this host share; its values are written on this stream."""
        self.written.record()
        known = self._cards.get(number)
        if known is None or known[0] is not piece:
            self._outdated += [known] if known else []
            assert self.comm.shared is not None
            card = self.comm.shared.own.zeros(CARD_BYTES, torch.uint8)
            card.copy_(torch.frombuffer(bytearray(self._card(piece)), dtype=torch.uint8))
            known = self._cards[number] = piece, card
        return known[1]

    def forget(self, number: int) -> None:
        """No rank asks for a piece any more."""
        self._cards.pop(number, None)

    def copy(self, rank: int, card: bytes, target: Tensor) -> None:
        """Copy a piece on the stream for that, once it is written; `target` must be free to be written there."""
        handle, offset = card[:_HANDLE_BYTES], int.from_bytes(card[_HANDLE_BYTES:], "little")
        if handle not in self._opened:
            self._opened[handle] = self._open(handle)
        self.stream.wait_event(self.peers[rank][0])
        size, stream = target.numel() * target.element_size(), self.stream.cuda_stream
        self._call("cuMemcpyDtoDAsync_v2", target.data_ptr(), self._opened[handle] + offset, size, stream)

    def done_reading(self) -> None:
        """Before a fence: what others offer may be written again once this rank's copies are made."""
        self.read.record(self.stream)

    def may_write(self) -> None:
        """After a fence: from now on this stream works when all others have read."""
        for _, read in self.peers.values():
            torch.cuda.current_stream().wait_event(read)
        self._outdated.clear()

    def close(self) -> None:
        """Let go of others' memory, when everything is copied."""
        self.stream.synchronize()
        for pointer in self._opened.values():
            self._call("cuIpcCloseMemHandle", pointer)
        self._opened.clear()

    def _card(self, piece: Tensor) -> bytes:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        at = piece.data_ptr()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), at)
        return ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES) + (at - base.value).to_bytes(8, "little")

    def _open(self, handle: bytes) -> int:
        given, pointer = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.addressof(given), handle, _HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, _LAZY_PEER_ACCESS)
        return pointer.value

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self.driver, name)(*args)
        if code:
            said = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(said))
            raise OSError(f"{name}: {(said.value or b'error').decode()} ({code})")


def _driver() -> ctypes.CDLL:
    driver, pointer, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = [pointer, pointer, number]
    driver.cuIpcGetMemHandle.argtypes = [pointer, number]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [number]
    driver.cuMemcpyDtoDAsync_v2.argtypes = [number, number, ctypes.c_size_t, pointer]
    return driver


def make(comm: Comm, device: torch.device) -> tuple[Reach | None, str]:
    """The GPU memory of this host's ranks, if all ranks can read theirs, or the reason why not. A group call."""
    if comm.shared is None:
        return None, comm.unshared
    made: Reach | None = None
    try:
        made = Reach(comm, device)
        mine: dict[str, str] = made.introduce()
    except (OSError, RuntimeError, AttributeError) as error:
        mine = {"reason": _said(error)}
    cards = [json.loads(card) for card in comm.bytes_of_all("reach", json.dumps(mine).encode())]
    reason = next((card["reason"] for card in cards if "reason" in card), "")
    if not reason:
        assert made is not None
        try:
            for rank in range(comm.world):
                if rank != comm.rank and comm.place(rank) is not None:
                    made.meet(rank, cards[rank])
        except (OSError, RuntimeError) as error:
            reason = _said(error)
    verdicts = [said.decode() for said in comm.bytes_of_all("reached", reason.encode())]
    reason = next(filter(None, verdicts), "")
    return (None, reason) if reason else (made, "")


def _said(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
