"""Codes of more numbers than are coded together: the same as piece by piece, right on average, exact where promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distributedtorch.core.wire import PIECE, Code
from distributedtorch.wire import sparsify
from distributedtorch.wire.cast import Bf16, Fp16
from distributedtorch.wire.quantize import Int8, Sign
from distributedtorch.wire.sparsify import RandomK, TopK

ALL = [Bf16(), Fp16(), Int8(), Sign(), TopK(0.01), RandomK(0.05)]
MANY = 2 * PIECE + 777


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of very different sizes, as gradients are."""
    draw = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=draw) * 10 ** (4 * torch.rand(count, generator=draw) - 6)
    return values.to(dtype)


def named(code: Code) -> str:
    return type(code).__name__


@pytest.mark.parametrize("code", ALL, ids=named)
@pytest.mark.parametrize("count", [1, 255, 2049, PIECE, PIECE + 1, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_writing_adding_and_reading_agree(code: Code, count: int, dtype: torch.dtype) -> None:
    values = numbers(count, dtype)
    made = code.encode(values, 5, torch.Generator().manual_seed(1))
    assert made.dtype == torch.uint8 and made.numel() == code.bytes(count, dtype)
    read, put, sums = code.decode(made, count, dtype, 5), torch.full_like(values, 7.0), torch.full_like(values, 0.5)
    code.put(made, put, 5)
    assert torch.equal(read, put)
    code.add(made, sums, 5, times=-1)
    assert torch.equal(sums, 0.5 - read)


@pytest.mark.parametrize("code", ALL, ids=named)
def test_no_numbers(code: Code) -> None:
    assert code.bytes(0, torch.float32) == 0
    made = code.encode(torch.empty(0), 5, None)
    assert made.numel() == 0 and code.decode(made, 0, torch.float32, 5).numel() == 0


@pytest.mark.parametrize("code", [Bf16(), Fp16(), Int8(), Sign()], ids=named)
def test_pieces_are_coded_each_by_itself(code: Code) -> None:
    values = numbers(MANY)
    made = [code.encode(piece, 5, None) for piece in values.split(PIECE)]
    assert torch.equal(code.encode(values, 5, None), torch.cat(made))


def rounded(seed: int, values: Tensor) -> Tensor:
    made = Int8().encode(values, 5, torch.Generator().manual_seed(seed))
    return Int8().decode(made, values.numel(), values.dtype, 5)


def test_rounding_at_random_is_right_on_average_in_every_piece() -> None:
    """The mean error of each number falls as that of independent draws does; rounding to the nearest is seen."""
    values = numbers(MANY)
    step = torch.nn.functional.pad(values, (0, -MANY % 256)).view(-1, 256).abs().amax(dim=1) / 127
    step = step.repeat_interleave(256)[:MANY]
    times = 16
    mean = torch.stack([rounded(seed, values) for seed in range(times)]).mean(dim=0)
    for piece, one in zip(((mean - values) / step).split(PIECE), rounded(0, values).split(PIECE), strict=True):
        assert piece.abs().mean() < 0.5 / times**0.5 and piece.mean().abs() < 0.01 and one.unique().numel() > 1
    nearest = Int8().decode(Int8().encode(values, 5, None), MANY, values.dtype, 5)
    assert ((nearest - values) / step).abs().mean() > 0.5 / times**0.5


def test_pieces_round_differently() -> None:
    """The same numbers in every piece, rounded by stretches of the noise that begin elsewhere."""
    once = numbers(PIECE)
    pieces = rounded(3, once.repeat(4)).split(PIECE)
    assert all(not torch.equal(pieces[0], other) for other in pieces[1:])


@pytest.mark.parametrize("kind", ["spread", "sorted", "few", "equal", "zeros", "infinite", "nan"])
@pytest.mark.parametrize("count", [100, 50_000])
def test_the_largest_are_found_however_numbers_lie(kind: str, count: int) -> None:
    values = numbers(5 * PIECE)
    if kind == "sorted":
        values = values.abs().sort().values
    elif kind == "few":
        values[1::2] = 0
        values[::64] = 0
    elif kind == "equal":
        values.fill_(2.0)
    elif kind == "zeros":
        values.zero_()
    elif kind == "infinite":
        values[7] = torch.inf
    elif kind == "nan":
        values[9] = torch.nan
    places = sparsify._largest_places(values, count)
    assert places.unique().numel() == count
    found, wanted = values[places].abs(), values.abs().topk(count).values
    assert torch.equal(found.sort(descending=True).values.nan_to_num(9e9), wanted.nan_to_num(9e9))


def test_a_guess_that_is_too_high_costs_time_only() -> None:
    values = numbers(5 * PIECE)
    values[::64] = 1e9  # exactly what is looked at
    assert torch.equal(
        sparsify._largest_places(values, 90_000).sort().values, values.abs().topk(90_000).indices.sort().values
    )


@pytest.mark.parametrize(("count", "ratio"), [(1, 0.05), (7, 0.5), (1000, 0.013), (100_003, 0.05), (10, 1.0)])
def test_places_at_random_are_all_different_and_each_comes_up(count: int, ratio: float) -> None:
    code = RandomK(ratio)
    seen = torch.zeros(count)
    for key in range(100):
        places = code.places(count, key)
        assert places.unique().numel() == code.count(count) and places.min() >= 0 and places.max() < count
        seen[places] += 1
    expected = 100 * code.count(count) / count
    assert abs(seen.mean() - expected) < 1e-3 and seen.max() < 2 * expected + 12
    assert count < 1000 or (seen.var() / expected < 1.2 and (seen == 0).float().mean() < 0.3)
