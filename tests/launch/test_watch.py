"""The watch names ranks that wait for each other, and a rank that does not come; never ranks that wait together."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from distributedtorch.core.errors import shown
from distributedtorch.elastic import watch

SCRIPT = Path(__file__).with_name("watched.py")


def watched(start, case, workers):
    run = start("-m", "distributedtorch", "run", "--workers", workers, SCRIPT, case)
    code = run.end()
    return code, run


def test_ranks_in_different_exchanges_end_with_both_named(start):
    code, run = watched(start, "mismatch", 2)
    assert code == 1
    said = (
        'DesyncError: rank 0 waits in "gradients/0/3 #17" (step 6) at train.py:30, while '
        'rank 1 waits in "state #1" (step 6) at train.py:31'
    )
    assert said in run.err
    (folder,) = (run.folder / ".dtorch").iterdir()
    assert all("DesyncError" in (folder / f"end.{rank}.json").read_text() for rank in range(2))
    assert run.gone_within(0.5)


def test_a_late_rank_is_named_once_with_its_line(start):
    code, run = watched(start, "late", 3)
    assert code == 0, run.err
    said = [line for line in run.err.splitlines() if "has not come to" in line]
    assert len(said) == 1, run.err
    assert said[0].startswith('dtorch: rank 1 has not come to "gradients/0/3 #17" (step 6) for ')
    assert "watched.py:" in said[0] and said[0].endswith("in load()")


def test_ranks_that_wait_together_are_left_alone(start):
    code, run = watched(start, "same", 2)
    assert code == 0
    assert run.err == ""


GOOD = {"number": 7, "exchange": None, "where": "", "waited": 0.0, "step": 1, "count": 2, "ranks": [], "line": "a.py:3"}
GOOD |= {"busy": ""}
HOSTILE = "\x1b]0;owned\x07\x1b[2J\rdone \u202eoff"


class Member:
    rank, world = 0, 2


def plain(text):
    return all(sign == "\n" or sign.isprintable() for sign in text)


@pytest.fixture
def watching(monkeypatch):
    """A watch of rank 0 that waits, in a store that others write to: the store, and what it says or ends with."""
    for name, seconds in {"BETWEEN_BEATS": 0.01, "TO_SUSPECT": -1.0, "TO_REPORT": -1.0, "TO_AGREE": 0.01}.items():
        monkeypatch.setattr(watch, f"_SECONDS_{name}", seconds)
    store, said, told = HashStore(), [], threading.Event()
    status = watch.Status(exchange="gradients #1", where="a.py:1", since=0.0, step=3, count=4)

    def tell(text, *, missing=None):
        said.append(text)
        told.set()
        raise RuntimeError

    def start():
        stop = watch.start(Member(), lambda: store, lambda: status, fail=tell, say=tell)
        assert told.wait(20)
        stop()
        return said[0]

    return store, start


def test_a_verdict_is_printed_without_control_characters(watching):
    store, start = watching
    store.set("watch/verdict", "\n" + HOSTILE + "x" * 100_000)
    text = start()
    assert plain(text) and "done" in text and len(text) < 10_000


@pytest.mark.parametrize(
    "value",
    [
        "",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        "\xff",
        json.dumps({**GOOD, "number": "x"}),
        json.dumps({**GOOD, "ranks": 3}),
        json.dumps({**GOOD, "line": "x" * (1 << 20)}),
        json.dumps({**GOOD, "count": 1e400}),
    ],
    ids=range(10),
)
def test_what_is_no_beat_does_not_end_the_watch(watching, value):
    store, start = watching
    store.set("watch/1", value)
    assert watch.beats(store, 1) == 0
    assert "nothing has been heard of it" in start()


def test_a_beat_is_read_and_shown_without_control_characters(watching):
    store, start = watching
    store.set("watch/1", json.dumps({**GOOD, "line": HOSTILE}))
    assert watch.beats(store, 1) == 7
    text = start()
    assert plain(shown(text)) and "done" in text


@pytest.mark.parametrize(
    ("text", "fit"),
    [
        ("plain, ä ü € 中 🙂\n\ttab", "plain, ä ü € 中 🙂\n\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\rb\x07\x9b2J", "a\\rb\\x07\\x9b2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u202etxt", "\\u202etxt"),
        ("\udc80", "\\udc80"),
    ],
)
def test_control_characters_are_spelt_out(text, fit):
    assert shown(text) == fit and shown(fit) == fit
