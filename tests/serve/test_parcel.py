"""Messages of several tensors: they come back as they went, and what is broken is refused before it is used."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from distributedtorch.serve.board import Refused
from distributedtorch.serve.parcel import ABSENT, Form, Item, joined, key, largest, parted, plain, rows, sparse
from distributedtorch.wire.sparsify import TopK

TABLE = Item(torch.zeros(20, 3), table=True)


def table(*numbers: int) -> Tensor:
    return sparse(torch.tensor(numbers), torch.ones(len(numbers), 3), (20, 3))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape).to(dtype)
    message = joined([ABSENT, plain(value), plain(value.double())])
    first, second, third = parted(message, 3)
    assert first[0] is Form.NONE
    assert torch.equal(Item(value).read(*second, 0), value)
    assert torch.equal(Item(value.double()).read(*third, 0), value.double())
    assert message.numel() <= largest([0, Item(value).most, 8 * value.numel()])


def test_rows() -> None:
    found = TABLE.read(*parted(joined([rows(table(0, 7, 19))]), 1)[0], 0)
    assert torch.equal(found.to_dense(), table(0, 7, 19).to_dense())
    place = torch.zeros(20, 3)
    TABLE.take(*parted(joined([rows(table(7))]), 1)[0], 0, place)
    assert torch.equal(place, table(7).to_dense())


def test_no_transposed_memory_is_misread() -> None:
    value = torch.randn(4, 6).t()
    assert torch.equal(Item(value).read(*parted(joined([plain(value)]), 1)[0], 0), value)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [((3, 20), "table of 20"), ((-1, 3), "table of 20"), ((5, 4), "rising order"), ((4, 4), "rising order")],
)
def test_wrong_rows(numbers: tuple[int, ...], said: str) -> None:
    data = torch.cat([torch.tensor(numbers).view(torch.uint8), torch.ones(2, 3).view(-1).view(torch.uint8)])
    with pytest.raises(Refused, match=said):
        TABLE.read(Form.ROWS, data, 0)
    with pytest.raises(Refused, match="bytes of rows"):
        TABLE.read(Form.ROWS, data[:-1], 0)


def test_forms_that_a_tensor_does_not_have() -> None:
    data = torch.zeros(80, dtype=torch.uint8)
    for form in (Form.ROWS, Form.CODE):
        with pytest.raises(Refused, match="another model"):
            Item(torch.zeros(20)).read(form, data, 0)
    with pytest.raises(Refused, match="80 bytes of a tensor, 160 needed"):
        Item(torch.zeros(20, dtype=torch.float64)).read(Form.PLAIN, data, 0)


def test_codes_that_point_elsewhere() -> None:
    item, code = Item(torch.zeros(2000), code=TopK(0.1)), TopK(0.1)
    data = code.encode(torch.randn(2000), 0, torch.Generator())
    data[:4] = torch.tensor([2000], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(Refused, match="cannot be read"):
        item.read(Form.CODE, data, 0)
    with pytest.raises(Refused, match="bytes of a tensor"):
        item.read(Form.CODE, data[:-4], 0)
    assert Item(torch.zeros(1000), code=code).code is None, "small tensors travel as they are"


def test_broken_messages_are_refused_or_read() -> None:
    """Whatever bytes of a message are changed, added or cut: Refused, or tensors of the right shapes."""
    draw = random.Random(0)
    whole = joined([plain(torch.randn(5)), rows(table(1, 2, 3)), ABSENT])
    items = [Item(torch.zeros(5)), TABLE, TABLE]
    refused = 0
    for _ in range(3000):
        message = whole.clone()
        for _ in range(draw.randint(1, 4)):
            message[draw.randrange(len(message) if draw.random() < 0.5 else 48)] = draw.randrange(256)
        message = message[: draw.randint(0, len(message))] if draw.random() < 0.2 else message
        try:
            parts = parted(message.clone(), 3)
            values = [item.read(*part, 0) for item, part in zip(items, parts, strict=True) if part[0] is not Form.NONE]
        except Refused:
            refused += 1
            continue
        assert all(value.shape in ((5,), (20, 3)) for value in values)
    assert refused > 1000


def test_keys_differ() -> None:
    words = product(range(3), range(3), range(9))
    assert len({key("push", *one) for one in words}) == 81
