"""The rules of a parameter server, played through with random delays."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from distributedtorch.serve.board import Board, Event, Refused
from tests.serve.history import staleness


def _nothing(_: object) -> None:
    pass


def play(board: Board, workers: int, pushes: int, seed: int, *, leaving: float = 0.0) -> list[Event]:
    """Workers that pull, compute for a while, and push, until so many pushes were applied."""
    events: list[Event] = []
    answered: list[int] = []
    board.note, board.answer = events.append, answered.append
    draw = random.Random(seed)
    slow = [draw.choice([1.0, 1.0, 4.0]) for _ in range(workers)]
    steps, ready = [0] * workers, [(0.0, worker, "pull") for worker in range(workers)]
    while board.version < pushes:
        assert ready, "everyone waits"
        now, worker, what = heapq.heappop(ready)
        answered.clear()
        if what == "pull":
            board.pull(worker)
        elif draw.random() < leaving:
            board.leave(worker)
            heapq.heappush(ready, (now + draw.expovariate(1), worker, "pull"))
        else:
            board.push(worker, steps[worker], None)
            if draw.random() < 0.1 and worker not in answered:  # the same again, as after a lost answer
                board.push(worker, steps[worker], None)
            steps[worker] += 1
        for other in answered:
            heapq.heappush(ready, (now + draw.expovariate(1 / slow[other]), other, "push"))
    return events


@pytest.mark.parametrize("bound", [1, 2, 8])
@pytest.mark.parametrize("workers", [2, 5])
def test_no_push_is_staler_than_the_bound(bound: int, workers: int) -> None:
    seen = staleness(play(Board(workers, _nothing, _nothing, staleness=bound), workers, 3000, bound, leaving=0.02))
    assert max(seen) == bound, "the bound holds, and is used"


def test_a_board_that_does_not_look_is_seen() -> None:
    board = Board(4, _nothing, _nothing, staleness=2)
    board._may_apply = lambda: True  # type: ignore[method-assign]
    assert max(staleness(play(board, 4, 2000, 0))) > 2


def test_rounds_average_everyone() -> None:
    rounds: list[list[int]] = []
    board = Board(3, lambda pushes: rounds.append([push.worker for push in pushes]), _nothing, staleness=0)
    assert set(staleness(play(board, 3, 200, 1))) == {0}
    assert rounds == [[0, 1, 2]] * 200


def test_nobody_is_more_steps_ahead_than_said() -> None:
    far: list[int] = []
    board = Board(3, lambda _: far.append(max(board.taken.values()) - min(board.taken.values())), _nothing, ahead=3)
    play(board, 3, 3000, 2)
    assert max(far) <= 3 + 1  # the step that is being computed


def test_without_a_bound_nobody_waits() -> None:
    answered: list[int] = []
    board = Board(2, _nothing, answered.append)
    board.pull(0)
    board.pull(1)
    for step in range(50):
        board.push(0, step, None)
    board.push(1, 0, None)
    assert answered == [0, 1, *[0] * 50, 1] and board.came[50] == 1


def test_the_same_step_counts_once() -> None:
    applied: list[int] = []
    answered: list[int] = []
    board = Board(1, lambda pushes: applied.extend(push.step for push in pushes), answered.append)
    board.pull(0)
    board.push(0, 0, None)
    board.push(0, 0, None)
    assert applied == [0] and board.version == 1 and answered == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong", [lambda board: board.push(1, 0, None), lambda board: (board.push(0, 0, None), board.pull(0))]
)
def test_out_of_turn(wrong: Callable[[Board], object]) -> None:
    board = Board(2, _nothing, _nothing, staleness=0)
    board.pull(0)
    with pytest.raises(Refused):
        wrong(board)
