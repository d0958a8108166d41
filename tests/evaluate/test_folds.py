"""Cross-validation: every sample is held out once, and the split is the seed's alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import distributedtorch as dt
from tests.evaluate.cases import data, network

Split = list[tuple[list[int], list[int]]]


def split(length: int, k: int, seed: int = 0) -> Split:
    return [(list(train.indices), list(held.indices)) for train, held in dt.folds(data(length), k, seed)]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("length", "k"), [(2, 2), (5, 2), (9, 3), (10, 4), (11, 11)])
def test_every_sample_is_held_out_once(length: int, k: int) -> None:
    parts = split(length, k)
    assert len(parts) == k
    assert sorted(i for _, held in parts for i in held) == list(range(length))
    assert all(sorted(train + held) == list(range(length)) for train, held in parts)
    sizes = [len(held) for _, held in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.timeout(20)
def test_only_the_seed_decides() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = split(40, 4)
    assert torch.equal(before, torch.random.get_rng_state()), "no other random state moves"
    torch.manual_seed(2)
    assert split(40, 4) == first and split(40, 4, seed=1) != first
    assert first[0][1] != list(range(10)), "shuffled, not cut"


@pytest.mark.timeout(20)
def test_the_documented_loop() -> None:
    found = [dt.accuracy(network(), DataLoader(held, batch_size=3)) for _, held in dt.folds(data(12), k=3)]
    assert sum(found) / 3 == pytest.approx(dt.accuracy(network(), DataLoader(data(12), batch_size=5)))
