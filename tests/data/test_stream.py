"""The stream draws what one process would, leaves this rank's own state alone, and travels as JSON."""

import json
import random
import time

import numpy
import pytest
import torch
from data_ranks import fresh

from distributedtorch.data.stream import Stream, drawing


def draws() -> tuple[float, float, float, float]:
    return torch.rand(()).item(), random.random(), numpy.random.rand(), numpy.random.randn()


def test_draws_equal_the_global_state_it_was_copied_from() -> None:
    fresh()
    expected = [draws() for _ in range(3)]
    fresh()
    stream = Stream()
    own = []
    seen = []
    for _ in range(3):
        with stream.drawing(full=True):
            seen.append(draws())
        own.append(draws())
    assert seen == expected
    assert own == expected, "this rank's own state must be untouched by the stream"


def test_torch_only_leaves_the_others_alone() -> None:
    fresh()
    expected = [draws() for _ in range(2)]
    fresh()
    stream = Stream()
    with stream.drawing(full=False):
        first = torch.rand(()).item()
    with stream.drawing(full=False):
        assert random.random() == expected[0][1], "python's state is this rank's own"
        second = torch.rand(()).item()
    assert [first, second] == [expected[0][0], expected[1][0]]
    with stream.drawing(full=True):
        assert random.random() == expected[0][1], "the stream's python state was not advanced"


def test_bytes_round_trip_and_are_json() -> None:
    fresh()
    stream = Stream()
    with stream.drawing(full=True):
        draws()
    data = stream.state_bytes()
    json.loads(data)
    fresh(9)
    other = Stream()
    other.load_bytes(data)
    for _ in range(2):
        with stream.drawing(full=True):
            expected = draws()
        with other.drawing(full=True):
            assert draws() == expected


def test_an_error_inside_puts_the_own_state_back() -> None:
    fresh()
    stream = Stream()
    fresh(7)
    expected = draws()
    fresh(7)
    with pytest.raises(KeyError), stream.drawing(full=True):
        draws()
        raise KeyError
    assert draws() == expected


def test_nested_drawing_continues_the_outer_one() -> None:
    fresh()
    expected = [torch.rand(()).item() for _ in range(3)]
    fresh()
    stream = Stream()
    with stream.drawing(full=True):
        seen = [torch.rand(()).item()]
        with stream.drawing(full=True):
            seen.append(torch.rand(()).item())
        seen.append(torch.rand(()).item())
    assert seen == expected


def test_no_stream_is_the_global_state() -> None:
    fresh()
    expected = draws()
    fresh()
    with drawing(None, full=True):
        assert draws() == expected


def test_torch_only_is_cheap() -> None:
    stream = Stream()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            with stream.drawing(full=False):
                pass
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 30e-6, f"{best * 1e6:.1f} us"
