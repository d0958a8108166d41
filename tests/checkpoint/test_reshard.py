"""Any plan and world to any other, to the bit; `benchmarks/reshard.py` runs all pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint import reshard_pool

ROOT = Path(__file__).parents[2]


def pool(what: str, folder: Path, world: int, kinds: str = "", sources: str = "") -> None:
    start = [] if world == 1 else ["distributedtorch", "run", "--workers", str(world), "-m"]
    command = [sys.executable, "-m", *start, "tests.checkpoint.reshard_pool", what, str(folder), kinds]
    command += [sources] if sources else []
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.timeout(240)
def test_pairs(tmp_path: Path) -> None:
    pool("save", tmp_path, 1, "words")
    pool("save", tmp_path, 3)
    pool("load", tmp_path, 2)
    pool("load", tmp_path, 1, "", "words-zero3-3,picture-zero1-3")
    pairs = 0
    for file in tmp_path.glob("table.*.json"):
        table = json.loads(file.read_text())
        pairs += len(table)
        assert {pair: found for pair, found in table.items() if found} == {}
    assert pairs == 2 * 12 * len(reshard_pool.PLANS) + 2 * len(reshard_pool.PLANS)
    expected = load_file(tmp_path / "words-zero3-3.safetensors")  # and one bit of one tensor would show
    expected["o0.0.row_var"].view(-1).view(torch.uint8)[1] ^= 1
    save_file(expected, tmp_path / "words-zero3-3.safetensors")
    assert reshard_pool.load(tmp_path, "words-zero3-3", "ddp") == ["o0.0.row_var"]
