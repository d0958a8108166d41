"""Codes of more numbers than are coded together: the same as piece by piece, right on average, exact where promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distributedtorch.core.comm import Comm
from distributedtorch.core.wire import Code
from distributedtorch.wire import pieces, quantize, sparsify
from distributedtorch.wire.cast import Bf16, Fp16
from distributedtorch.wire.feedback import Coded
from distributedtorch.wire.pieces import PIECE, InPieces, Noise
from distributedtorch.wire.quantize import Int2, Int4, Int8, Sign
from distributedtorch.wire.sparsify import RandomK, TopK

ALL = [Bf16(), Fp16(), Int8(), Int4(), Int2(), Sign(), TopK(0.01), RandomK(0.05)]
MANY = 2 * PIECE + 777
MORE = sparsify._MANY + 300_000


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
    near = {Bf16: 0.01, Fp16: 0.01, Int8: 1 / 126}.get(type(code))
    if near is not None:
        assert ((read - values).abs() <= near * values.abs().max()).all() and read.abs().max() > 0
    code.add(made, sums, 5, times=-1)
    assert torch.equal(sums, 0.5 - read)


@pytest.mark.parametrize("code", ALL, ids=named)
def test_no_numbers(code: Code) -> None:
    assert code.bytes(0, torch.float32) == 0
    made = code.encode(torch.empty(0), 5, None)
    assert made.numel() == 0 and code.decode(made, 0, torch.float32, 5).numel() == 0


@pytest.mark.parametrize("code", [Bf16(), Fp16(), Int8(), Int4(), Int2(), Sign()], ids=named)
def test_pieces_are_coded_each_by_itself(code: InPieces) -> None:
    """One after the other, as on the CPU, and all at once, as on accelerators: the same bytes and numbers."""
    values = numbers(MANY)
    made = [code.encode(piece, 5, None) for piece in values.split(PIECE)]
    assert torch.equal(code.encode(values, 5, None), torch.cat(made))
    rows, at_once = values[: 2 * PIECE].view(2, PIECE), torch.stack(made[:2]).zero_()
    code._encode(rows, at_once, torch.empty(2 * PIECE), None)
    assert torch.equal(at_once, torch.stack(made[:2]))
    drawn = at_once.clone()
    code._encode(rows, drawn, torch.empty(2 * PIECE), Noise(torch.Generator().manual_seed(1)))
    assert torch.equal(drawn.view(-1), code.encode(rows.view(-1), 5, torch.Generator().manual_seed(1)))
    read = torch.empty(2, PIECE)
    code._decode(at_once, read)
    assert torch.equal(read.view(-1), torch.cat([code.decode(one, PIECE, torch.float32, 5) for one in made[:2]]))


@pytest.mark.parametrize("code", ALL, ids=named)
def test_codes_at_addresses_that_fit_no_type(code: Code) -> None:
    values = numbers(PIECE + 3001)
    made = code.encode(values, 5, None)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), made])[1:]
    assert torch.equal(
        code.decode(moved, len(values), values.dtype, 5), code.decode(made, len(values), values.dtype, 5)
    )


def rounded(seed: int, values: Tensor, code: Code | None = None) -> Tensor:
    code = code or Int8()
    made = code.encode(values, 5, torch.Generator().manual_seed(seed))
    return code.decode(made, values.numel(), values.dtype, 5)


def test_rounding_at_random_is_right_on_average_in_every_piece() -> None:
    """The mean error of each number falls as that of independent draws does; rounding to the nearest is seen."""
    values = torch.randn(MANY, generator=torch.Generator().manual_seed(MANY))
    step = torch.nn.functional.pad(values, (0, -MANY % 256)).view(-1, 256).abs().amax(dim=1) / 127
    step = step.repeat_interleave(256)[:MANY]
    times = 16
    mean = torch.stack([rounded(seed, values) for seed in range(times)]).mean(dim=0)
    for piece in ((mean - values) / step).split(PIECE):
        assert piece.abs().mean() < 0.5 / times**0.5 and piece.mean().abs() < 0.01
    nearest = Int8().decode(Int8().encode(values, 5, None), MANY, values.dtype, 5)
    assert ((nearest - values) / step).abs().mean() > 0.5 / times**0.5


@pytest.mark.parametrize("size", [1e-45, 2e-43, 1e-38, 1e-30, 1.0, 3e38])
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_number_comes_out_larger_or_with_another_sign(size: float, noisy: bool, dtype: torch.dtype) -> None:
    """Bits are not limited to the steps that fit; the steps are chosen so that there are never more."""
    values = (numbers(PIECE).sign() * size).to(dtype)
    made = Int8().encode(values, 5, torch.Generator().manual_seed(1) if noisy else None)
    read = Int8().decode(made, len(values), values.dtype, 5)
    at_most = values.double().abs() * (1 + (2**-19 if dtype != torch.bfloat16 else 2**-7))
    assert (read.double().abs() <= at_most).all() and (read * values.sign() >= 0).all()
    assert size < 1e-35 or (read.double().abs() >= values.double().abs() * 0.98).all()


def test_steps_of_every_width_are_never_more_than_fit() -> None:
    """All mantissas of float32 as a block's largest number, with the largest noise there is."""
    largest = torch.arange(1 << 23, dtype=torch.int32).add_(127 << 23).view(torch.float32)
    step = (largest / 127).mul_(quantize._WIDER)
    noise = torch.tensor(1 - 2**-24)
    assert (largest / step).add_(noise).floor_().max() == 127 and (-largest / step).floor_().min() == -127
    assert (largest / (largest / 127)).add_(noise).floor_().max() == 128, "nothing would be tested"


@pytest.mark.parametrize(("code", "at_most"), [(Int4(), 0.012), (Int2(), 0.12), (Sign(), 0.37)])
def test_how_much_is_left_out_of_normal_numbers(code: Code, at_most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of their power as levels at the best distance leave out; at another it is more."""
    values = torch.randn(MANY, generator=torch.Generator().manual_seed(1))

    def left() -> float:
        return float((rounded(1, values, code) - values).square().mean())

    assert 0.9 * at_most < left() < at_most
    for factor in (0.8, 1.2) if isinstance(code, Int4 | Int2) else ():
        monkeypatch.setattr(type(code), "apart", factor * type(code).apart)
        assert left() > at_most
        monkeypatch.undo()


def test_blocks_of_zeros_stay_zeros() -> None:
    """Beside others, and in the padding."""
    values = numbers(MANY)
    values[256 * 5 : 256 * 9], values[-777:] = 0.0, 0.0
    for code in (Int8(), Int4(), Int2(), Sign()):
        read = rounded(1, values, code)
        assert isinstance(code, Sign) or not (read[256 * 5 : 256 * 9].any() or read[-256:].any())
        assert torch.isfinite(read).all() and read[256 * 9 : 256 * 10].any()


@pytest.mark.parametrize("code", [Int8(), Int4(), Int2()], ids=named)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("noisy", [True, False])
def test_what_is_not_finite_stays_in_its_block(code: Code, bad: float, noisy: bool) -> None:
    values = numbers(2048)
    values[:256] = 100.0

    def read() -> Tensor:
        made = code.encode(values, 5, torch.Generator().manual_seed(1) if noisy else None)
        return code.decode(made, 2048, torch.float32, 5)

    before = read()
    values[3] = bad
    assert torch.equal(read()[256:], before[256:]) and not torch.isfinite(read()[3])


@pytest.mark.parametrize("code", [Int4(), Int2(), Sign()], ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_left_out_is_the_difference(code: InPieces, dtype: torch.dtype) -> None:
    """Piece by piece as all at once: what was left out before counts, and nothing of it gets lost."""
    values, left = numbers(MANY, dtype), numbers(MANY + 1, dtype)[1:].clone()
    known = left.clone()
    whole = values + left
    made = code.encode_more(values, left, 5, None)
    plain = Code.encode_more(code, values, known, 5, None)
    assert made is not None and plain is not None and torch.equal(made, plain) and torch.equal(left, known)
    read = code.decode(made, MANY, dtype, 5)
    assert torch.equal(left, whole - read) and read.any()
    assert code.encode_more(torch.full((3000,), 3e38), torch.full((3000,), 3e38), 5, None) is None


@pytest.mark.parametrize("code", [Bf16(), Fp16(), Int8(), Int4(), Int2()], ids=named)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("noisy", [True, False])
def test_what_is_not_finite_is_not_finite_after(code: Code, bad: float, noisy: bool) -> None:
    values = numbers(MANY)
    values[[7, PIECE + 300]] = bad
    made = code.encode(values, 5, torch.Generator() if noisy else None)
    read = code.decode(made, MANY, values.dtype, 5)
    assert not torch.isfinite(read[[7, PIECE + 300]]).any() and torch.isfinite(read[PIECE // 2 : PIECE]).all()


def test_half_floats_have_a_scale_near_them() -> None:
    values = numbers(MANY).clamp(-1, 1)
    values[:2048], values[2048:] = 1.0, values[2048:].sign() * 1e-9
    read = Fp16().decode(Fp16().encode(values, 5, None), MANY, values.dtype, 5)
    assert ((read - values).abs() <= values.abs() * 2**-10).all()


def test_reading_and_writing_again_changes_nothing() -> None:
    """To the nearest: what is stored and shown as a code stays where it is."""
    code, values = Int8(), numbers(MANY)
    once = code.encode(values, 5, None)
    assert torch.equal(code.encode(code.decode(once, MANY, values.dtype, 5), 5, None), once)


def spread_of_sums(values: Tensor) -> float:
    """Of the sum of all rounding errors, beside what independent draws give: numbers that are 0.3 between two steps."""
    sums = torch.stack([rounded(seed, values).double().sum() - values.double().sum() for seed in range(60)])
    return float(sums.var() / (int((values == 0.3).sum()) * 0.3 * 0.7))


def test_errors_of_different_pieces_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small part of each: those of a whole piece cancel, because its noise is equally spaced."""
    values = torch.zeros(6, PIECE)
    values[:, : PIECE // 64] = 0.3
    values[:, ::256] = 127.0
    assert 0.4 < spread_of_sums(values.view(-1)) < 1.8

    kept = Noise.of

    def unmoved(self: Noise, rows: Tensor) -> Tensor:
        self.draw.manual_seed(self.draw.initial_seed())
        return kept(self, rows)

    monkeypatch.setattr(Noise, "of", unmoved)
    assert spread_of_sums(values.view(-1)) > 3


def test_errors_of_a_whole_piece_cancel() -> None:
    values = torch.full((PIECE,), 0.3)
    values[::256] = 127.0
    assert spread_of_sums(values) < 0.05


def largest_direction(seeds: int) -> float:
    """Of rounding errors inside a block, beside what independent draws give: numbers halfway between two steps."""
    values = torch.full((256,), 0.5)
    values[0] = 127.0
    errors = torch.stack([rounded(seed, values) - values for seed in range(seeds)])[:, 1:].double()
    return float(torch.linalg.eigvalsh(errors.T @ errors / seeds)[-1] / 0.25)


def test_errors_inside_a_block_have_no_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_direction(4000) < 2.0
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(1, dtype=torch.int64))
    assert largest_direction(4000) > 4


def test_noise_of_many_pieces_at_once() -> None:
    rows = torch.empty(3 * PIECE // 256, 256)
    found = Noise(torch.Generator().manual_seed(1)).of(rows)
    assert found.shape == rows.shape and found.min() > 0 and found.max() < 1
    assert abs(found.mean() - 0.5) < 1e-5 and abs(found.var() - 1 / 12) < 1e-5
    first, second, _ = (found.view(3, -1) - 0.5).unbind()
    assert abs((first * second).mean()) * 12 < 0.02


def test_neighbours_in_the_table_have_nothing_in_common() -> None:
    """Numbers at a distance are rounded as if independently, whatever the distance: up to one of a hundred."""
    noise = pieces._table(torch.device("cpu"), torch.float64)[:PIECE] - 0.5
    by_distance = torch.fft.irfft(torch.fft.rfft(noise).abs().square()) / (PIECE / 12)
    assert by_distance[1:].abs().max() < 0.01 and abs(by_distance[0] - 1) < 1e-5


@pytest.mark.parametrize("kind", ["spread", "sorted", "few", "equal", "zeros", "infinite", "nan"])
@pytest.mark.parametrize("count", [100, 50_000])
def test_the_largest_are_found_however_numbers_lie(kind: str, count: int) -> None:
    values = numbers(MORE)
    if kind == "sorted":
        values = values.abs().sort().values
    elif kind == "few":
        values[1::2] = 0
        values[:: sparsify._SAMPLE] = 0
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


@pytest.mark.parametrize("kind", ["too high", "too low"])
def test_a_guess_that_is_wrong_costs_time_only(kind: str) -> None:
    values, count = numbers(MORE), 50_000
    if kind == "too high":
        values[:: sparsify._SAMPLE] = torch.linspace(8, 9, len(values[:: sparsify._SAMPLE]))
    else:
        values, count = torch.ones(MORE), 500
        values[-100:] = 5.0
    wanted = values.abs().topk(count).values
    assert torch.equal(values[sparsify._largest_places(values, count)].abs().sort(descending=True).values, wanted)


@pytest.mark.parametrize("code", [Int4(), Int2(), Sign(), TopK(0.05), RandomK(0.05)], ids=named)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_reaches_all_and_nothing_is_counted_twice(code: Code, bad: float) -> None:
    """Wherever it stands, also at a place that does not travel; what was left out before is left out still."""
    wire, draw = Coded(Comm(0, 1), code), torch.Generator()
    wire.reduced("a", torch.ones(2000), 1, draw)
    before = wire.left["a"].clone()
    for place in range(0, 2000, 97):
        values = torch.ones(2000)
        values[place] = bad
        read = code.decode(wire.reduced("a", values, 2, draw), 2000, torch.float32, 2)
        assert not torch.isfinite(read).all() and torch.equal(wire.left["a"], before)


@pytest.mark.parametrize(("count", "ratio"), [(1, 0.05), (7, 0.5), (100, 0.7), (1000, 0.4), (1000, 0.013), (10, 1.0)])
def test_places_at_random_are_all_different_and_equally_likely(count: int, ratio: float) -> None:
    code, times = RandomK(ratio), 2000
    seen = torch.zeros(count)
    for key in range(times):
        places = code.places(count, key)
        assert places.unique().numel() == code.count(count) and places.min() >= 0 and places.max() < count
        seen[places] += 1
    likely = code.count(count) / count
    off = (seen - times * likely) / max(1.0, (times * likely * (1 - likely)) ** 0.5)
    assert off.abs().max() < 5
