"""Loaders that only hand out whole batches: every container is cut by its leading dimension, or refused in words."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from data_ranks import join, keep, loader_of, plain, run, together
from torch.utils.data import DataLoader

from distributedtorch.core.errors import UsageError
from distributedtorch.data import cut as cut_module
from distributedtorch.data.cut import divide_batch, leading, with_dims
from distributedtorch.data.partition import Part

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str
    derived: int = dataclasses.field(default=3, init=False)


def parts_of(batch: Any, world: int, reverse: bool = False) -> list[Any]:
    return [divide_batch(batch, Part(rank=rank, world=world, reverse=reverse)) for rank in range(world)]


X = torch.arange(10).reshape(5, 2)
Y = torch.arange(5)

CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tensor": (X, lambda piece: piece),
    "list": ([X, Y], lambda piece: piece[0]),
    "tuple": ((X, "text", torch.tensor(7.0), 3), lambda piece: piece[0]),
    "namedtuple": (Pair(X, Y), lambda piece: piece.x),
    "dict": ({"x": X, "inner": {"y": Y}, "names": list("abcde")}, lambda piece: piece["x"]),
    "ordered": (OrderedDict(x=X), lambda piece: piece["x"]),
    "userdict": (UserDict(x=X), lambda piece: piece["x"]),
    "dataclass": (Record(X, "n"), lambda piece: piece.x),
    "numpy": ({"x": X.numpy()}, lambda piece: torch.from_numpy(piece["x"].copy())),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, world: int, reverse: bool) -> None:
    batch, field = CONTAINERS[name]
    parts = parts_of(batch, world, reverse)
    assert torch.equal(torch.cat([field(piece)[:rows] for rows, _, piece in parts]), X.flip(0) if reverse else X)
    assert all(type(piece) is type(batch) and total == 5 for _, total, piece in parts)
    assert all(len(field(piece)) == max(1, rows) for rows, _, piece in parts), "an idle rank holds one row"
    assert torch.equal(field(batch), X), "the user's batch stays whole"


def test_everything_in_a_batch_is_cut_or_passed() -> None:
    _, _, piece = parts_of(CONTAINERS["dict"][0], 2)[1]
    assert piece["names"] == ["d", "e"] and piece["inner"]["y"].tolist() == [3, 4]
    _, _, piece = parts_of(CONTAINERS["tuple"][0], 2)[1]
    assert piece[1] == "text" and piece[2].item() == 7.0 and piece[3] == 3
    assert parts_of(["a", "b", "c"], 2)[0][2] == ["a", "b"]


def test_disagreeing_shapes_are_refused_with_the_shapes() -> None:
    with pytest.raises(UsageError, match=r"\(5, 2\), \(4,\)") as caught:
        leading([X, torch.zeros(4)])
    assert "needed:" in str(caught.value) and "do:" in str(caught.value)
    with pytest.raises(UsageError, match="dict without tensors"):
        leading({"a": 1})


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_rows_in_another_dimension(world: int, reverse: bool) -> None:
    wide = torch.arange(30).reshape(2, 5, 3)
    fields = {"x": wide, "n": Y, "deep": [wide.numpy(), "text", torch.tensor(1.0)], "names": list("abcde")}
    sparse = torch.arange(10).reshape(2, 5).to_sparse()
    for batch, dims in ((fields, 1), (fields, (1, 0, 1)), ([wide, sparse], 1)):
        parts = [divide_batch(batch, Part(rank=r, world=world, reverse=reverse, dims=dims)) for r in range(world)]
        for field, (place, dim) in enumerate(with_dims(batch, dims)):
            whole = torch.as_tensor(place).to_dense()
            found = [torch.as_tensor(with_dims(piece, dims)[field][0]).to_dense() for _, _, piece in parts]
            joined = torch.cat([one.narrow(dim, 0, rows) for one, (rows, _, _) in zip(found, parts, strict=True)], dim)
            assert torch.equal(joined, whole.flip(dim) if reverse else whole) and whole.shape[dim] == 5
            assert all(one.is_contiguous() for one in found), "as a batch of its own would be"


def test_disagreeing_dimensions_are_refused_with_the_shapes() -> None:
    with pytest.raises(UsageError, match=r"\(2, 5, 3\), \(4,\)"):
        leading([torch.zeros(2, 5, 3), torch.zeros(4)], 1)
    for dims in ((1,), (1, 1), (1, 0, 0)):
        with pytest.raises(UsageError, match=r"2 tensors of shapes \(2, 5, 3\), \(5,\)"):
            leading([torch.zeros(2, 5, 3), Y], dims)


def test_one_process_passes_anything_unchanged() -> None:
    batch = [X, torch.zeros(4)]
    rows, total, piece = divide_batch(batch, Part(rank=0, world=1))
    assert piece is batch and rows == total == 5


class Custom:
    """Shuffled batches, drawn from Python's state."""

    def __iter__(self) -> Any:
        order = list(range(10))
        random.shuffle(order)
        for start in range(0, 10, 4):
            yield torch.tensor(order[start : start + 4])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_custom_iterable(world: int) -> None:
    expected = [[batch.tolist() for batch in epoch] for epoch in plain(Custom)]
    got = [[[int(row) for row in batch] for batch in epoch] for epoch in together(run(Custom, world))]
    assert got == expected


def test_a_wrong_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_module, "_slice", lambda array, span, *_: array[: len(span)])
    expected = [[batch.tolist() for batch in epoch] for epoch in plain(Custom)]
    assert [[[int(row) for row in b] for b in epoch] for epoch in together(run(Custom, 2))] != expected


def test_list_of_batches_and_generator() -> None:
    batches = [torch.arange(4), torch.arange(3)]
    ranks = run(lambda: batches, 2, epochs=2)
    assert len(ranks[0].loader) == 2 and bool(ranks[0].loader)
    assert ranks[0].loader.note == "not a DataLoader: every rank builds whole batches and keeps its rows"
    once = join(lambda: (batch for batch in batches), 1, 2)
    assert [batch.tolist() for batch in once.loader] == [[2, 3], [2]]
    assert "walked only once" in once.loader.note
    with pytest.raises(TypeError):
        len(once.loader)
    assert bool(once.loader)


def test_a_dataloader_with_its_own_iter() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (torch.tensor(batch) * 2 for batch in super().__iter__())

    rank = join(lambda: Doubled(range(5), batch_size=4, collate_fn=keep), 1, 2)
    assert [batch.tolist() for batch in rank.loader] == [[4, 6], [8]] and "own way" in rank.loader.note
    assert [share.rows for share in rank.shares] == [2, 0]


def test_errors_leave_the_walk_usable() -> None:
    class Fails:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.at += 1
            if self.at == 2:
                raise OSError("broken file")
            return torch.full((4,), self.at)

    walk = iter(join(Fails, 0, 2).loader)
    assert next(walk).tolist() == [1, 1]
    with pytest.raises(OSError, match="broken file"):
        next(walk)
    assert next(walk).tolist() == [3, 3]
    assert numpy.isfinite(len(loader_of(4)()))
