"""Every pair of built words trains, and gives the weights of one process under the same words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.conformance.cases import PLANS, difference
from tests.conformance.matrix import ROOT
from tests.conformance.words_pool import TEXTS


def run(world: int, folder: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "distributedtorch", "run", "--workers", str(world)]
    command += ["-m", "tests.conformance.words_pool", str(folder)]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr


def test_every_pair_of_words(tmp_path: Path) -> None:
    run(1, tmp_path)
    run(3, tmp_path)
    truth = load_file(tmp_path / "two losses.safetensors")
    for plan, world in [("ddp", 1), *((plan, 3) for plan in PLANS)]:
        found = load_file(tmp_path / f"{plan},two losses-{world}.safetensors")
        assert difference(truth, found)[0] <= 1e-9, (plan, "two losses", world)
    without = load_file(tmp_path / "ddp,recompute-1.safetensors")
    for text in TEXTS:
        truth = load_file(tmp_path / f"ddp,{text}-1.safetensors")
        assert text == "recompute" or difference(truth, without)[0] > 1e-4  # the words do something
        for plan in PLANS:
            found = load_file(tmp_path / f"{plan},{text}-3.safetensors")
            assert difference(truth, found)[0] <= 1e-9, (plan, text)
