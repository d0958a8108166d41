"""Numbers as small integers with a scale per block: 8 bits, or the sign alone.

Alistarh et al., "QSGD", NeurIPS 2017 (rounding at random, so that it is right on average); Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022 (a scale per block); Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014, and Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019 (the sign, with what it
leaves out kept).

Bytes per number: int8 1 + 4/256, sign 1/8 + 4/2048. Use int8 where fp16 is not enough: its noise is small beside that
of a batch. Use sign where links are slower still; it needs the kept errors, as much memory as the gradients have.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from distributedtorch.wire.pieces import InPieces, Noise, blocks_of, in_blocks, largest, place, typed, write_scaled

INT8_BLOCK, SIGN_BLOCK = 256, 2048
_WIDER = 1 + 2**-20
"""By so much are steps that numbers are rounded to at random, so that none comes to 128 of them."""
_LEAST = torch.finfo(torch.float32).tiny
"""Steps that are smaller have lost digits: numbers of such blocks become zeros, or so small a step at most."""
_GATHER = 0x0102_0408_1020_4080
"""Times eight bytes of 0 or 1: their bits in the uppermost byte, the first byte's lowest."""


class Int8(InPieces):
    """Multiples of a 127th of the block's largest number, rounded up or down at random, or to the nearest."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, INT8_BLOCK) + numel

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        blocks = in_blocks(rows.to(room.dtype), INT8_BLOCK)
        count, steps = len(blocks) // len(rows), room[: blocks.numel()].view(blocks.shape)
        size = largest(blocks, room)
        size /= size.new_full((), 127.0)  # by a plain number accelerators would multiply with its inverse
        size *= 1.0 if noise is None else _WIDER
        scale = place(code, 0, count, torch.float32).copy_(size.view(len(rows), -1))
        step = scale.where(scale > _LEAST, 1.0).to(room.dtype).view(-1, 1)
        if noise is None:
            torch.div(blocks, step, out=steps).add_(0.5)
        else:
            noise.fill(steps).addcdiv_(blocks, step)
        whole = steps.floor_().view(len(rows), -1)
        place(code, 4 * count, rows.shape[1], torch.int8).copy_(whole[:, : rows.shape[1]])

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        numel, count = rows.shape[1], blocks_of(rows.shape[1], INT8_BLOCK)
        scale = typed(code, 0, count, torch.float32).reshape(-1, 1)
        write_scaled(rows, in_blocks(typed(code, 4 * count, numel, torch.int8), INT8_BLOCK), scale)


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
