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

from distributedtorch.core.wire import Code, blocks_of, in_blocks, pack, unpack

INT8_BLOCK, SIGN_BLOCK = 256, 2048


class Int8(Code):
    """Multiples of a 127th of the block's largest number, rounded up or down at random, or to the nearest."""

    feedback = False

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, INT8_BLOCK) + numel

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        rows = in_blocks(values, INT8_BLOCK)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        scale = (rows.abs().amax(dim=1) / 127).float()
        steps = rows / scale.where(scale > 0, 1.0).to(rows.dtype).unsqueeze(1)
        up = 0.5 if draw is None else torch.rand(steps.shape, generator=draw, dtype=steps.dtype).to(steps.device)
        whole = (steps + up).floor().clamp(-127, 127).to(torch.int8)
        return pack(scale, whole.view(-1)[: values.numel()])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        scale, whole = unpack(code, (blocks_of(numel, INT8_BLOCK), torch.float32), (numel, torch.int8))
        return (in_blocks(whole.to(dtype), INT8_BLOCK) * scale.to(dtype).unsqueeze(1)).view(-1)[:numel]


class Sign(Code):
    """The sign of each number, and the mean size of a block's numbers."""

    feedback = True

    def bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * blocks_of(numel, SIGN_BLOCK) + blocks_of(numel, 8)

    def encode(self, values: Tensor, key: int, draw: torch.Generator | None) -> Tensor:
        rows = in_blocks(values, SIGN_BLOCK)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        counts = in_blocks(torch.ones_like(values, dtype=rows.dtype), SIGN_BLOCK).sum(dim=1)
        scale = (rows.abs().sum(dim=1) / counts).float()
        bits = in_blocks((values >= 0).to(torch.uint8), 8)
        return pack(scale, (bits << _places(bits.device)).sum(dim=1, dtype=torch.uint8))

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        blocks = blocks_of(numel, SIGN_BLOCK)
        scale, packed = unpack(code, (blocks, torch.float32), (blocks_of(numel, 8), torch.uint8))
        bits = (packed.unsqueeze(1) >> _places(packed.device)) & 1
        signs = bits.view(-1)[:numel].to(dtype) * 2 - 1
        return (in_blocks(signs, SIGN_BLOCK) * scale.to(dtype).unsqueeze(1)).view(-1)[:numel]


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
