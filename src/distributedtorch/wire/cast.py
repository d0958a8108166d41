"""Numbers in a shorter floating type: bfloat16, or float16 scaled so that the largest of a block is 1.

Micikevicius et al., "Mixed Precision Training", ICLR 2018 (why float16 needs a scale).

Bytes: half of float32's, and for float16 4 more per block. Use it where the link is the limit and nothing else may
change: what is lost is at most a 2000th of each number (float16; less exact below a 16000th of its block's largest) or
a 250th (bfloat16, which has the range of float32), and not kept for later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributedtorch.wire.pieces import InPieces, Noise, blocks_of, in_blocks, largest, place, typed, write_scaled

FP16_BLOCK = 2048


class Bf16(InPieces):
    """Numbers rounded to bfloat16."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        place(code, 0, rows.shape[1], torch.bfloat16).copy_(rows)

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        rows.copy_(typed(code, 0, rows.shape[1], torch.bfloat16))


class Fp16(InPieces):
    """Numbers divided by the largest of their block, rounded to float16."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, FP16_BLOCK) + 2 * numel

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        blocks = in_blocks(rows.to(room.dtype), FP16_BLOCK)
        count, parts = len(blocks) // len(rows), room[: blocks.numel()].view(blocks.shape)
        scale = place(code, 0, count, torch.float32).copy_(largest(blocks, room).view(len(rows), -1))
        torch.div(blocks, scale.where(scale > 0, 1.0).to(room.dtype).view(-1, 1), out=parts)
        numel = rows.shape[1]
        place(code, 4 * count, numel, torch.float16).copy_(parts.view(len(rows), -1)[:, :numel])

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        numel, count = rows.shape[1], blocks_of(rows.shape[1], FP16_BLOCK)
        scale = typed(code, 0, count, torch.float32).reshape(-1, 1)
        values = in_blocks(typed(code, 4 * count, numel, torch.float16), FP16_BLOCK)
        write_scaled(rows, values, scale)
