"""What only zero3 does: models filled a module at a time, compiled, Hugging Face's own; each as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.test_loops import ALL, run

LIMITS = {"bert": 1e-9, "vit": 1e-9, "gpt2": 1e-6, "llama": 1e-6, "t5": 1e-6}
"""The last three compute their loss or softmax in float32, and a rank's mean is over other numbers of tokens."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world", [2, 3] if ALL else [3])
def test_divided_parameters_behave_as_whole_ones(world: int, tmp_path: Path) -> None:
    (tmp_path / "done.jsonl").touch()
    run(world, tmp_path, "tests.conformance.divided_pool")


@pytest.mark.timeout(120)
def test_only_used_rows_of_a_table_travel_and_change(tmp_path: Path) -> None:
    (tmp_path / "done.jsonl").touch()
    run(3, tmp_path, "tests.conformance.sparse_pool")


@pytest.mark.timeout(180)
def test_hugging_face_models_end_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = run(2, tmp_path, "tests.conformance.hf_pool", "DONE", bucket_bytes=16384)
    assert {row["model"] for row in rows} == set(LIMITS)
    assert not [row for row in rows if not row["difference"] <= LIMITS[row["model"]]]
