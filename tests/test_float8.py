"""Products in 8-bit floats: near the exact ones, as far as 3 bits (2 for gradients) let them; never exact."""

from __future__ import annotations

import pytest
import torch

from distributedtorch import float8


@pytest.mark.parametrize("rows", [16, 21])
def test_products_and_gradients_are_near(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(48, 32, requires_grad=True)
    out = float8._Product.apply(x, weight)  # type: ignore[no-untyped-call]
    grad = torch.randn_like(out)
    out.backward(grad)
    left, right = grad.float().flatten(0, 1), x.detach().float().flatten(0, 1)
    exact = (x.float() @ weight.t(), (left @ weight).view(x.shape), left.t() @ right)
    for found, true in zip((out, x.grad, weight.grad), exact, strict=True):
        gap = float((found.detach().float() - true.detach()).norm() / true.detach().norm())
        assert 5e-3 < gap < 0.08, gap
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)  # type: ignore[union-attr]
