"""Pieces cover every row once, in order, and differ by at most one."""

import pytest

from distributedtorch.data.partition import Part, rows, sizes


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("total", range(0, 20))
def test_pieces_cover_every_row_once_in_order(total: int, world: int) -> None:
    pieces = [rows(total, world, rank) for rank in range(world)]
    assert [row for piece in pieces for row in piece] == list(range(total))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_a_rank_outside_the_world_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        rows(4, 2, 2)


def test_sizes_as_text() -> None:
    assert sizes(32, 2) == "16 + 16"
    assert sizes(33, 2) == "17 + 16"
    assert sizes(2, 3) == "1 + 1 + 0"
    assert sizes(258, 8) == "2 x 33 + 6 x 32"


def test_take_reversed_keeps_every_item() -> None:
    parts = [Part(rank=rank, world=3, reverse=True).take(list("abcde")) for rank in range(3)]
    assert ["".join(items) for _, _, items in parts] == ["ed", "cb", "a"]


def test_take_without_rows_repeats_the_first_item() -> None:
    assert Part(rank=2, world=3).take([7, 8]) == (0, 2, [7])
    assert Part(rank=2, world=3).take([]) == (0, 0, [])
