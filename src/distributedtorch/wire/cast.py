"""Numbers in a shorter floating type: bfloat16, or float16 scaled so that the largest is 1.

Micikevicius et al., "Mixed Precision Training", ICLR 2018 (why float16 needs a scale).

Bytes: half of float32's, and for float16 4 more per piece. Use it where the link is the limit and nothing else may
change: what is lost is about 1e-3 of each number and not kept for later. bfloat16 has the range of float32 and three
bits less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributedtorch.wire.pieces import InPieces, Noise, largest, place, typed


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
    """Numbers divided by the largest of a piece, rounded to float16."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 + 2 * numel

    def _encode(self, rows: Tensor, code: Tensor, room: Tensor, noise: Noise | None) -> None:
        rows, parts = rows.to(room.dtype), room[: rows.numel()].view(rows.shape)
        scale = place(code, 0, 1, torch.float32).copy_(largest(rows, room).unsqueeze(1))
        place(code, 4, rows.shape[1], torch.float16).copy_(torch.div(rows, scale.where(scale > 0, 1.0), out=parts))

    def _decode(self, code: Tensor, rows: Tensor) -> None:
        scale, values = typed(code, 0, 1, torch.float32), typed(code, 4, rows.shape[1], torch.float16)
        if rows.dtype.itemsize < 4:
            rows.copy_(values * scale)
        else:
            rows.copy_(values).mul_(scale)
