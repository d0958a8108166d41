"""Numbers as small integers with a scale per block: 8, 4 or 2 bits, or the sign alone.

Alistarh et al., "QSGD", NeurIPS 2017 (rounding at random, so that it is right on average); Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022 (a scale per block); Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014, and Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019 (the sign, with what it
leaves out kept); Max, "Quantizing for Minimum Distortion", IRE Transactions 1960 (how far levels are apart).

Bytes per number: int8 1 + 4/256, int4 1/2 + 4/256, int2 1/4 + 4/256, sign 1/8 + 4/2048. Use int8 where fp16 is not
enough: its noise is small beside that of a batch. Use the others where links are slower still; they need the kept
errors, as much memory as the gradients have. Of normal numbers int4 leaves out 1.2% of their power at a time, int2 12%,
sign 36%. Numbers beyond 1e18 are too large for int4 and int2: they arrive as NaN.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from distributedtorch.wire.pieces import InPieces, Noise, blocks_of, in_blocks, largest, place, typed, write_scaled

INT_BLOCK, SIGN_BLOCK = 256, 2048
_WIDER = 1 + 2**-20
"""By so much are steps that numbers are rounded to at random, so that none comes to one more of them than fit."""
_LEAST = torch.finfo(torch.float32).tiny
"""Steps that are smaller have lost digits: numbers of such blocks become zeros, or so small a step at most."""
_GATHER = 0x0102_0408_1020_4080
"""Times eight bytes of 0 or 1: their bits in the uppermost byte, the first byte's lowest."""


class Int8(InPieces):
    """Multiples of a 127th of the block's largest number, rounded up or down at random, or to the nearest."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, INT_BLOCK) + numel

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        blocks = in_blocks(rows.to(room.dtype), INT_BLOCK)
        steps = room[: blocks.numel()].view(blocks.shape)
        size = largest(blocks, room)
        size /= size.new_full((), 127.0)  # by a plain number accelerators would multiply with its inverse
        size *= 1.0 if noise is None else _WIDER
        step = _write_scale(size, code, rows, room)
        begun = steps.new_full((), 0.5) if noise is None else noise.of(steps)
        whole = torch.addcdiv(begun, blocks, step, out=steps).floor_().view(len(rows), -1)
        place(code, _scales(rows), rows.shape[1], torch.int8).copy_(whole[:, : rows.shape[1]])

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        values = typed(code, _scales(rows), rows.shape[1], torch.int8)
        write_scaled(rows, in_blocks(values, INT_BLOCK), _scale(code, rows))


class _Levels(InPieces):
    """The nearest of a few levels, as many on either side of zero; the scale of a block is half a step from level to
    level, and the levels are the odd multiples of it."""

    feedback = True
    bits: ClassVar[int]
    apart: ClassVar[float]
    """How far levels are apart that lose the least of normal numbers, as times their root mean square (Max 1960)."""

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return blocks_of(numel, INT_BLOCK) * (4 + INT_BLOCK * self.bits // 8)

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        blocks, count = in_blocks(rows.to(room.dtype), INT_BLOCK), 1 << self.bits
        levels = room[: blocks.numel()].view(blocks.shape)
        of_each = levels.new_full((len(blocks), 1), INT_BLOCK)
        of_each[-1] -= blocks.numel() - rows.numel()
        size = torch.linalg.vector_norm(blocks, dim=1, keepdim=True).mul_(self.apart / 2).div_(of_each.sqrt_())
        step = _write_scale(size, code, rows, room).mul_(2.0)
        torch.mul(blocks, step.reciprocal_(), out=levels).add_(count / 2).clamp_(0.0, count - 1.0).floor_()
        _pack(levels.view(len(rows), -1), code[:, _scales(rows) :], bits=self.bits)

    def _take_out(self, rows: Tensor, code: Tensor, used: Tensor, found: Tensor) -> None:
        if rows.numel() % INT_BLOCK or rows.dtype != used.dtype:
            super()._take_out(rows, code, used, found)
            return
        levels = used.view(-1, INT_BLOCK)[: rows.numel() // INT_BLOCK].sub_(((1 << self.bits) - 1) / 2)
        rows.view(-1, INT_BLOCK).sub_(levels.mul_(_scale(code, rows) * 2.0))

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        levels = _unpack(code[:, _scales(rows) :], bits=self.bits).mul_(2).sub_((1 << self.bits) - 1)
        write_scaled(rows, levels, _scale(code, rows))


class Int4(_Levels):
    """The nearest of 16 levels."""

    bits, apart = 4, 0.3352


class Int2(_Levels):
    """The nearest of 4 levels."""

    bits, apart = 2, 0.9957


def _write_scale(size: Tensor, code: Tensor, rows: Tensor, room: Tensor) -> Tensor:
    """Put the scale of each block in front of a code. Result: what its numbers are divided by."""
    scale = place(code, 0, blocks_of(rows.shape[1], INT_BLOCK), torch.float32).copy_(size.view(len(rows), -1))
    return scale.where(scale > _LEAST, 1.0).to(room.dtype).view(-1, 1)


def _scales(rows: Tensor) -> int:
    """Bytes of the scales in front of each row's code."""
    return 4 * blocks_of(rows.shape[1], INT_BLOCK)


def _scale(code: Tensor, rows: Tensor) -> Tensor:
    return typed(code, 0, blocks_of(rows.shape[1], INT_BLOCK), torch.float32).reshape(-1, 1)


def _pack(levels: Tensor, code: Tensor, *, bits: int) -> None:
    """Put several small whole numbers into a byte: those of the first part of a row into the lowest bits."""
    parts = levels.to(torch.int8).view(torch.uint8).view(len(levels), 8 // bits, -1)  # to uint8 it takes seven times
    parts &= (1 << bits) - 1  # NaN as an integer may be any: it stays in its block
    code.copy_(parts[:, 0])
    for k in range(1, 8 // bits):
        code |= parts[:, k] << bits * k


def _unpack(code: Tensor, *, bits: int) -> Tensor:
    """The small numbers of each byte, in blocks."""
    parts = torch.empty(len(code), 8 // bits, code.shape[1], dtype=torch.uint8, device=code.device)
    for k in range(8 // bits):
        torch.bitwise_right_shift(code, bits * k, out=parts[:, k]).bitwise_and_((1 << bits) - 1)
    return parts.view(torch.int8).view(-1, INT_BLOCK)


class Sign(InPieces):
    """The sign of each number, and the mean size of a block's numbers."""

    feedback = True

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, SIGN_BLOCK) + blocks_of(numel, 8)

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        blocks = in_blocks(rows.to(room.dtype), SIGN_BLOCK)
        count, sizes = len(blocks) // len(rows), room[: blocks.numel()].view(blocks.shape)
        of_each = sizes.new_full((len(blocks),), SIGN_BLOCK)
        of_each[-1] -= blocks.numel() - rows.numel()
        scale = torch.abs(blocks, out=sizes).sum(dim=1).div_(of_each)
        place(code, 0, count, torch.float32).copy_(scale.view(len(rows), -1))
        eight = in_blocks((rows >= 0).to(torch.uint8), 8).view(torch.int64)
        code[:, 4 * count :].copy_((eight * _GATHER >> 56).view(len(rows), -1))

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        numel, count = rows.shape[1], blocks_of(rows.shape[1], SIGN_BLOCK)
        table = _signs(code.device, torch.promote_types(rows.dtype, torch.float32))
        signs = table.index_select(0, code[:, 4 * count :].reshape(-1).int()).view(len(rows), -1)[:, :numel]
        scale = typed(code, 0, count, torch.float32).reshape(-1, 1)
        rows.copy_(in_blocks(signs, SIGN_BLOCK).mul(scale).view(len(rows), -1)[:, :numel])


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The eight signs of each byte."""
    bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
    return (bits * 2 - 1).to(dtype)
