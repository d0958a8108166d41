"""Users' loops give the weights of one process under every plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conformance.cases import PLANS
from tests.conformance.tables import LOOPS


def run(world: int, folder: Path, *module: str, bucket_bytes: int = 1024, shared: bool = True) -> list[dict[str, Any]]:
    done = folder / "done.jsonl"
    environ = {"DISTRIBUTEDTORCH_BUCKET_BYTES": str(bucket_bytes), "DISTRIBUTEDTORCH_SHARED": str(int(shared))}
    words = [str(done) if word == "DONE" else word for word in module]
    ended = forked.run(world, *words, cwd=folder, timeout=300, environ=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(row) for row in done.read_text().splitlines()]


ALL = bool(os.environ.get("DISTRIBUTEDTORCH_TEST_ALL"))
"""Every loop under every plan at both world sizes, for twice the time."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "plans", "shared"), [(2, ("ddp", "zero3"), False), (3, ("zero1", "zero2,share"), True)]
)
def test_loops_end_as_in_one_process(world: int, plans: tuple[str, ...], shared: bool, tmp_path: Path) -> None:
    plans = (*PLANS, "zero1,share", "zero2,share") if ALL and shared else PLANS if ALL else plans
    rows = run(world, tmp_path, "tests.conformance.loops_pool", "DONE", f"plans={';'.join(plans)}", shared=shared)
    assert {(r["loop"], r["plan"]) for r in rows} == {(name, plan) for name in LOOPS for plan in plans}
    assert not [r for r in rows if not r["difference"] <= 1e-9]
    irregular = {r["plan"]: r["counts"] for r in rows if r["loop"] == "irregular_windows"}
    every_backward = irregular["zero3" if "zero3" in plans else "zero2,share"]["reduce-scatter"]
    assert irregular.get("ddp", {"all-reduce": 0})["all-reduce"] < 0.7 * every_backward
    assert irregular.get("zero1", {"reduce-scatter": 0})["reduce-scatter"] < 0.7 * every_backward


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sabotage", "loop", "plan"),
    [
        ("ranks_count_equally", "clip_by_value", "ddp"),
        ("local_norms", "clip_by_other_norms", "zero1"),
        ("gradients_stay_local", "l2_in_the_loss", "ddp"),
        pytest.param("rows_stay_local", "tables_under_adagrad", "ddp", marks=pytest.mark.long),
        pytest.param("decisions_stay_local", "plateau_on_local_losses", "zero1", marks=pytest.mark.long),
        ("edits_stay_unseen", "clamp_weights_after_step", "zero2,share"),
    ],
)
def test_broken_builds_are_caught(sabotage: str, loop: str, plan: str, tmp_path: Path) -> None:
    pool = "tests.conformance.loops_pool"
    rows = run(2, tmp_path, "tests.conformance.sabotage", sabotage, pool, "DONE", f"plans={plan}", loop)
    assert [r for r in rows if r["plan"] == plan and r["difference"] > 1e-6]


@pytest.mark.timeout(120)
def test_replicas_that_part_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"differs between ranks after step \d+: .* on rank 0, .* on rank 1"):
        pool = ("tests.conformance.loops_pool", "DONE", "plans=ddp", "l2_in_the_loss")
        run(2, tmp_path, "tests.conformance.sabotage", "gradients_stay_local,watched", *pool)


@pytest.mark.timeout(120)
def test_ranks_that_stop_at_different_steps_are_caught(tmp_path: Path) -> None:
    loop = "early_stop_on_local_losses"
    with pytest.raises(AssertionError, match=r"every rank (to make the same calls|takes every batch)"):
        run(
            2,
            tmp_path,
            "tests.conformance.sabotage",
            "decisions_stay_local",
            "tests.conformance.loops_pool",
            "DONE",
            loop,
        )
