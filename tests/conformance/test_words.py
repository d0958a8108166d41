"""Every pair of built words trains, and gives the weights of one process under the same words."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests import forked
from tests.conformance.cases import PLANS, difference
from tests.conformance.words_pool import BALANCED, TEXTS, WITH


def run(world: int, folder: Path) -> None:
    ended = forked.run(world, "tests.conformance.words_pool", str(folder), cwd=folder)
    assert ended.returncode == 0, ended.stderr


def test_every_pair_of_words_that_are_not_exact(tmp_path: Path) -> None:
    ended = forked.run(2, "tests.conformance.pairs_pool", cwd=tmp_path)
    assert ended.returncode == 0 and "pairs train" in ended.stdout, ended.stderr


def test_every_pair_of_words(tmp_path: Path) -> None:
    run(1, tmp_path)
    run(3, tmp_path)
    truth = load_file(tmp_path / "two losses.safetensors")
    for plan, world in [("ddp", 1), *((plan, 3) for plan in PLANS)]:
        found = load_file(tmp_path / f"{plan},two losses-{world}.safetensors")
        assert difference(truth, found)[0] <= 1e-9, (plan, "two losses", world)
    without = load_file(tmp_path / "ddp,recompute-1.safetensors")
    for text in [*TEXTS, BALANCED]:
        truth = load_file(tmp_path / f"ddp,{text}-1.safetensors")
        assert text == "recompute" or difference(truth, without)[0] > 1e-4  # the words do something
        for plan in PLANS:
            found = load_file(tmp_path / f"{plan},{text}-3.safetensors")
            assert difference(truth, found)[0] <= 1e-9, (plan, text)
            if text == BALANCED and plan != "ddp":
                found = load_file(tmp_path / f"{plan},{text},replicate=3-3.safetensors")
                assert difference(truth, found)[0] <= 1e-9, (plan, text, "replicate=3")
            if text in WITH.get(plan, ()):
                found = load_file(tmp_path / f"{plan},{text},share-3.safetensors")
                assert difference(truth, found)[0] <= 1e-9, (plan, text, "share")
