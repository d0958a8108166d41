"""The cursor counts global batches and samples, and survives JSON."""

import json

from distributedtorch.data.cursor import Cursor, Share


def test_counts() -> None:
    cursor = Cursor()
    assert cursor.begin() == 0
    first = cursor.advance(2, 4, 0)
    assert first == Share(batch=0, epoch=0, rows=2, rows_global=4, first_sample=0) and not first.idle
    assert cursor.begin() == 1
    second = cursor.advance(0, 1, 1)
    assert second == Share(batch=1, epoch=1, rows=0, rows_global=1, first_sample=4) and second.idle
    assert cursor.state_dict() == {"epoch": 1, "batch": 1, "batches": 2, "samples": 5, "ended": False}


def test_state_round_trip() -> None:
    cursor = Cursor()
    cursor.begin()
    cursor.advance(1, 3, 0)
    other = Cursor()
    other.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert other == cursor
    assert other.begin() == 1
