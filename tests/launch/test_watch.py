"""The watch names ranks that wait for each other, and a rank that does not come; never ranks that wait together."""

from __future__ import annotations

from pathlib import Path

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
