"""Numbers in a shorter floating type: bfloat16, or float16 scaled so that the largest is 1.

Micikevicius et al., "Mixed Precision Training", ICLR 2018 (why float16 needs a scale).

Bytes: half of float32's, and for float16 4 more per piece. Use it where the link is the limit and nothing else may
change: what is lost is about 1e-3 of each number and not kept for later. bfloat16 has the range of float32 and three
bits less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributedtorch.core.wire import Code, Noise, largest, pack, unpack


class Bf16(Code):
    """Numbers rounded to bfloat16."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        return pack(values.to(torch.bfloat16))

    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        return unpack(code, (numel, torch.bfloat16))[0].to(dtype)


class Fp16(Code):
    """Numbers divided by the largest of a piece, rounded to float16."""

    feedback = False

    def _bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 + 2 * numel

    def _encode(self, values: Tensor, key: int, noise: Noise | None) -> Tensor:
        scale = largest(values.view(1, -1)).float()
        return pack(scale, (values / scale.where(scale > 0, 1.0)).to(torch.float16))

    def _decode(self, code: Tensor, numel: int, dtype: torch.dtype, key: int) -> Tensor:
        scale, values = unpack(code, (1, torch.float32), (numel, torch.float16))
        return values.to(dtype) * scale.to(dtype)
