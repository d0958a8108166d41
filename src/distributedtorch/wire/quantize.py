"""Numbers as small integers with a scale per block: 8 bits, or the sign alone.

Alistarh et al., "QSGD", NeurIPS 2017 (rounding at random, so that it is right on average); Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022 (a scale per block); Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014, and Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019 (the sign, with what it
leaves out kept).

Bytes per number: int8 1 + 4/256, sign 1/8 + 4/2048. Use int8 where fp16 is not enough: its noise is small beside that
of a batch. Use sign where links are slower still; it needs the kept errors, as much memory as the gradients have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributedtorch.core.wire import Code, Noise, blocks_of, in_blocks, largest, pack, unpack

INT8_BLOCK, SIGN_BLOCK = 256, 2048
_GATHER = 0x0102_0408_1020_4080
"""Times eight bytes of 0 or 1: their bits in the uppermost byte, the first byte's lowest."""
_SIGNS = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1) * 2 - 1
"""The eight signs of each byte."""


class Int8(Code):
    """Multiples of a 127th of the block's largest number, rounded up or down at random, or to the nearest."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, INT8_BLOCK) + numel

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        rows = in_blocks(values, INT8_BLOCK)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        scale = (largest(rows) / 127).float()
        steps = rows / scale.where(scale > 0, 1.0).to(rows.dtype).unsqueeze(1)
        steps += 0.5 if noise is None else noise.rows(steps)
        whole = steps.floor_().clamp_(-127, 127).to(torch.int8)
        return pack(scale, whole.view(-1)[: values.numel()])

    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        scale, whole = unpack(code, (blocks_of(numel, INT8_BLOCK), torch.float32), (numel, torch.int8))
        return (in_blocks(whole.to(dtype), INT8_BLOCK) * scale.to(dtype).unsqueeze(1)).view(-1)[:numel]


class Sign(Code):
    """The sign of each number, and the mean size of a block's numbers."""

    feedback = True

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, SIGN_BLOCK) + blocks_of(numel, 8)

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        rows = in_blocks(values, SIGN_BLOCK)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        counts = rows.new_full((len(rows),), SIGN_BLOCK)
        counts[-1] = values.numel() - SIGN_BLOCK * (len(rows) - 1)
        scale = (rows.abs().sum(dim=1) / counts).float()
        eight = in_blocks((values >= 0).to(torch.uint8), 8).view(torch.int64)
        return pack(scale, (eight * _GATHER >> 56).to(torch.uint8))

    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        blocks = blocks_of(numel, SIGN_BLOCK)
        scale, packed = unpack(code, (blocks, torch.float32), (blocks_of(numel, 8), torch.uint8))
        signs = _SIGNS.to(packed.device, dtype).index_select(0, packed.int()).view(-1)[:numel]
        return (in_blocks(signs, SIGN_BLOCK) * scale.to(dtype).unsqueeze(1)).view(-1)[:numel]
