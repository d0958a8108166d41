"""The GPU memory of other ranks of this host, read where it lies: through no host memory, and nobody is asked.

CUDA's interprocess handles name memory. Copies are made by the GPU's copy engines on a stream of their own, in an order
that streams keep and no host waits for. Each rank has two counters in its GPU memory: a copy begins when its owner's
`written` has come to the count that the piece was offered with; an owner writes again when the `read` of all others has
come to the count of the last fence.

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
CARD_BYTES = _HANDLE_BYTES + 8 + 8
"""A card: the handle of an allocation, where in it a piece begins, and its owner's count when it is written."""
_LAZY_PEER_ACCESS = 1
_AT_LEAST = 0
_WRITTEN, _READ = range(2)
_TOKEN = 0x64746F72


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class Reach:
    """The ranks of this host by their GPU memory. Made and closed by all ranks together."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm
        self.driver = _driver()
        self.stream = torch.cuda.Stream(device)
        """Copies from other ranks."""
        self.words = torch.tensor([0, 0, _TOKEN], dtype=torch.int32, device=device)
        """The two counters as the GPU has come to them, and something to know them by."""
        self.counts = [0, 0]
        """What they come to when all that is queued is done. 32 bits go round: the GPU compares by difference."""
        self.peers: dict[int, int] = {}
        """By rank, where its words lie."""
        self._opened: dict[bytes, int] = {}
        self._cards: dict[int, tuple[Tensor, Tensor]] = {}
        self._outdated: list[tuple[Tensor, Tensor]] = []
        """Pieces and cards that ranks may still look at which have not come to a newer edition."""

    def introduce(self) -> dict[str, str]:
        """What other ranks need to find this one's memory."""
        torch.cuda.current_stream().synchronize()
        return {"words": self._card(self.words).hex()}

    def meet(self, rank: int, card: dict[str, str]) -> None:
        """Find a rank's counters, and try to read its memory.

        Raises:
            OSError: That cannot be done.
        """
        words = bytes.fromhex(card["words"])
        self.peers[rank] = self._at(words)
        found = torch.zeros_like(self.words)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.copy(rank, words, found)
        self.stream.synchronize()
        if found[-1].item() != _TOKEN:
            raise OSError(f"the GPU memory of rank {rank} reads as something else")

    def card(self, number: int, piece: Tensor) -> Tensor:
        """Where a piece lies, in memory that the ranks of this host share; its values are written on this stream."""
        self._count(_WRITTEN, torch.cuda.current_stream())
        known = self._cards.get(number)
        if known is None or known[0] is not piece:
            self._outdated += [known] if known else []
            assert self.comm.shared is not None
            card = self.comm.shared.own.zeros(CARD_BYTES, torch.uint8)
            card.copy_(torch.frombuffer(bytearray(self._card(piece)), dtype=torch.uint8))
            known = self._cards[number] = piece, card
        known[1][-8:].copy_(torch.tensor([self.counts[_WRITTEN]]).view(torch.uint8))
        return known[1]

    def forget(self, number: int) -> None:
        """No rank asks for a piece any more."""
        self._cards.pop(number, None)

    def copy(self, rank: int, card: bytes, target: Tensor) -> None:
        """Copy a piece on the stream for that, once it is written; `target` must be free to be written there."""
        self._wait(rank, _WRITTEN, int.from_bytes(card[-8:], "little"), self.stream)
        size, stream = target.numel() * target.element_size(), self.stream.cuda_stream
        self._call("cuMemcpyDtoDAsync_v2", target.data_ptr(), self._at(card), size, stream)

    def done_reading(self) -> None:
        """Before a fence: what others offer may be written again once this rank's copies are made."""
        self._count(_READ, self.stream)

    def may_write(self) -> None:
        """After a fence: from now on this stream works when all others have read."""
        for rank in self.peers:  # all ranks have come to as many fences
            self._wait(rank, _READ, self.counts[_READ], torch.cuda.current_stream())
        self._outdated.clear()

    def close(self) -> None:
        """Let go of others' memory, when everything is copied."""
        self.stream.synchronize()
        for pointer in self._opened.values():
            self._call("cuIpcCloseMemHandle", pointer)
        self._opened.clear()

    def _count(self, which: int, stream: torch.cuda.Stream) -> None:
        """Raise a counter when the stream has come here."""
        self.counts[which] += 1
        at = self.words[which].data_ptr()
        self._call("cuStreamWriteValue32_v2", stream.cuda_stream, at, self.counts[which] % 2**32, 0)

    def _wait(self, rank: int, which: int, count: int, stream: torch.cuda.Stream) -> None:
        """Let the stream go on when a rank's counter has come to a count."""
        at = self.peers[rank] + which * self.words.element_size()
        self._call("cuStreamWaitValue32_v2", stream.cuda_stream, at, count % 2**32, _AT_LEAST)

    def _card(self, piece: Tensor) -> bytes:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        at = piece.data_ptr()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), at)
        offset, count = (value.to_bytes(8, "little") for value in (at - base.value, self.counts[_WRITTEN]))
        return ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES) + offset + count

    def _at(self, card: bytes) -> int:
        """The address that a card names, here."""
        handle, offset = card[:_HANDLE_BYTES], int.from_bytes(card[_HANDLE_BYTES:-8], "little")
        if handle not in self._opened:
            self._opened[handle] = self._open(handle)
        return self._opened[handle] + offset

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
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = [pointer, number, ctypes.c_uint32, ctypes.c_uint]
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
