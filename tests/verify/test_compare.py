"""What rounding explains and what it does not, on forged runs; and the parts that make a record."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from distributedtorch.verify.compare import Runs
from distributedtorch.verify.record import hashes
from distributedtorch.verify.runs import Kind, Run, Step
from distributedtorch.verify.sketch import distance, norm, sketch
from distributedtorch.verify.still import still
from distributedtorch.verify.verdict import Verdict, judge

SHAPES = {"body.weight": (40, 30), "body.bias": (40,), "head.weight": (3, 40), "mean": (5,)}
STEPS, LR = 4, 1e-3
Change = Callable[[int, str, Tensor], Tensor]


def forged(seed: int, change: Change = lambda step, name, grad: grad) -> Run:
    """Plain gradient descent along random gradients; `seed` decides the rounding, `change` the fault."""
    draw, rounding = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    run = Run(
        kinds={name: Kind(dtype="float32", numel=t.numel(), trained=name != "mean") for name, t in tensors.items()}
    )
    run.initial = {name: sketch(name, tensor) for name, tensor in tensors.items()}
    for step in range(1, STEPS + 1):
        grads = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in tensors.items()}
        grads = {
            n: change(step, n, g * (1 + 1e-7 * torch.randn(g.shape, generator=rounding))) for n, g in grads.items()
        }
        tensors = {name: tensor - LR * grads[name] for name, tensor in tensors.items()}
        sketches = {name: sketch(name, grad) for name, grad in grads.items() if name != "mean"}
        rows = Counter({f"{step}-{k}": 1 for k in range(7)})
        run.steps.append(
            Step(
                lr=[LR],
                losses=[1.0 / step],
                rows=[rows],
                rows_of_ranks=[[4, 3]],
                gradient=sketches,
                used=sketches,
                state={name: sketch(name, tensor) for name, tensor in tensors.items()},
                drifted=[],
            )
        )
    run.final = tensors
    return run


def verdict(plan: Run, noise: Run | None = None) -> Verdict:
    return judge(Runs(truth=forged(1), noise=noise or forged(2), plan=plan), "forged", STEPS)


def with_step(run: Run, step: int, **fields: object) -> Run:
    run = copy.copy(run)
    run.steps = [replace(one, **fields) if k + 1 >= step else one for k, one in enumerate(run.steps)]  # type: ignore[arg-type]
    return run


def only(name: str, factor: float, first: int = 1) -> Change:
    return lambda step, given, grad: grad * factor if given == name and step >= first else grad


@pytest.mark.parametrize("seed", range(3, 23))
def test_rounding_is_the_same_result(seed: int) -> None:
    found = verdict(forged(seed))
    assert found.same, found


@pytest.mark.parametrize("factor", [2.0, 1.1, 1.0003])
def test_a_gradient_slightly_wrong_is_caught(factor: float) -> None:
    """At 1.0003 the parameter itself is wrong by 6e-7 of its size: within any fixed bound on float32."""
    found = verdict(forged(3, only("head.weight", factor, first=2)))
    assert found.fault is not None
    assert (found.fault.step, found.fault.what) == (2, "parameter head.weight"), found


FAULTS: dict[str, tuple[Run, int, str]] = {
    "weighting": (forged(3, only("body.weight", 1.2)), 1, "counted equally"),
    "buffer": (forged(3, only("mean", 1.2)), 1, "a buffer follows this rank's rows only"),
    "pairs": (with_step(forged(3), 1, losses=[0.7]), 1, "loss over pairs in the batch"),
    "sum": (with_step(forged(3), 1, losses=[0.5]), 1, "the loss is a sum"),
    "scaled": (with_step(forged(3), 1, lr=[2 * LR]), 1, "multiplied by the number of workers"),
    "scheduler": (with_step(forged(3), 2, lr=[LR / 10]), 2, "scheduler is stepped"),
    "clip": (
        with_step(forged(3, only("body.bias", 1.2)), 1, gradient=forged(3).steps[0].gradient),
        1,
        "clipping by the norm",
    ),
    "lost": (with_step(forged(3), 2, losses=[0.4], rows=[Counter({"2-0": 7})]), 2, "samples repeated or lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_link_that_differs_names_the_reason(fault: str) -> None:
    plan, step, reason = FAULTS[fault]
    plan.world = 2
    found = verdict(plan)
    assert found.fault is not None
    assert (found.fault.step, reason in found.fault.reasons[0]) == (step, True), found


def test_fewer_steps_than_one_process() -> None:
    plan = forged(3)
    plan.steps, plan.final = plan.steps[:2], {}
    found = verdict(plan)
    assert found.fault is not None
    assert found.fault.what == "number of steps"


def test_not_a_number_is_never_the_same() -> None:
    found = verdict(forged(3, only("body.bias", math.nan, first=3)))
    assert found.fault is not None
    assert found.fault.step == 3


def test_a_zero_gradient_moves_by_rounding_alone() -> None:
    """Its rounding, made large by an optimizer that normalises, is no difference; that of the others still is."""

    def bias(seed: int) -> Change:
        draw = torch.Generator().manual_seed(seed)
        return lambda step, name, grad: torch.randn(grad.shape, generator=draw) * 1e-9 if name == "body.bias" else grad

    def run(seed: int) -> Run:
        return forged(seed, bias(seed))

    found = judge(Runs(truth=run(1), noise=run(2), plan=run(3)), "forged", STEPS)
    assert found.same, found
    assert [row.name for row in found.parameters if not row.judged] == ["body.bias"]


def test_sketches_tell_how_far_apart_tensors_are() -> None:
    draw = torch.Generator().manual_seed(5)
    for size in (1, 3, 1000, 40_000):
        for trial in range(10):
            one, other = torch.randn(size, generator=draw), torch.randn(size, generator=draw)
            ratio = distance(sketch(f"t{trial}", one), sketch(f"t{trial}", other)) / float((one - other).norm())
            assert 0.25 < ratio < 3, (size, ratio)
            assert norm(sketch("t", one)) == pytest.approx(float(one.norm()), rel=1e-5)


def test_one_element_of_many_shows() -> None:
    one = torch.zeros(100_000)
    other = one.clone()
    other[77_777] = 1.0
    assert 0.25 < distance(sketch("t", one), sketch("t", other)) < 3


def test_rows_are_known_by_their_content() -> None:
    x, y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 0, 1])
    seen = list(hashes({"x": x, "y": y}, 4))
    assert sorted(hashes({"x": x.flip(0), "y": y.flip(0)}, 4)) == sorted(seen)
    assert len(set(seen)) == 4
    assert set(hashes({"x": x, "y": y.flip(0)}, 4)).isdisjoint(seen), "rows with the labels of others"
    assert len(set(hashes(x.bfloat16(), 4))) == 4
    assert len(set(hashes(["a", "b"], 2))) == 2


def test_every_kind_of_dropout_is_set_to_zero() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    model = nn.ModuleDict({"layer": layer, "rnn": nn.LSTM(8, 8, 2, dropout=0.3), "off": nn.Dropout(0.0)})
    expected = ["layer.self_attn.dropout (0.2)", "layer.dropout (0.2)", "layer.dropout1 (0.2)", "layer.dropout2 (0.2)"]
    assert still(model) == [*expected, "rnn.dropout (0.3)"]
    assert still(model) == []
