"""README's figures are those of the stored file, and the benchmark notices who does other work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.conductor import Outcome, Setting, compare_losses, grouped
from benchmarks.peers import BASES, IDEAL, PINS, VARIANTS

ROOT = Path(__file__).parents[1]
ORIGIN = {"cores": 2, "processor": "a processor", "torch": "2.13.0", "commit": "abc"}
SETTING = {"parameters": 23_200_000, "batch": 4, "model": {"length": 128}}


def one(seconds: dict[str, list[float]], **failed: str) -> dict[str, object]:
    variants = {name: {"failed": ""} for name in seconds} | {name: {"failed": why} for name, why in failed.items()}
    described = {"origin": ORIGIN, "setting": SETTING, "ranks": 2, "rounds": 3, "paired": True}
    return {**described, "table": figures.table(seconds), "variants": variants}


SECONDS = {IDEAL: [1.0, 2.0, 4.0], "ddp": [1.1, 2.2, 4.4], "torch DDP": [1.2, 2.4, 4.8]}


def test_readme_shows_what_is_stored() -> None:
    stored = json.loads(figures.STORED.read_text()) if figures.STORED.exists() else {}
    readme = (ROOT / "README.md").read_text()
    assert figures.with_figures(readme, stored) == readme, "write it anew: python -m benchmarks.figures"


def test_a_figure_changed_by_hand_is_seen() -> None:
    stored = {"work": one(SECONDS)}
    readme = figures.with_figures(f"before {figures.BEGIN} old {figures.END} after", stored)
    assert "| **ddp** | 2200 (1100–4400) | 1.10 (1.10–1.10) | 0.92 (0.92–0.92) |" in readme  # noqa: RUF001
    assert readme.startswith("before ") and readme.endswith(" after")
    forged = readme.replace("1.10", "1.01")
    assert figures.with_figures(forged, stored) != forged


def test_a_failure_stays_in_the_table() -> None:
    assert "| zero9 | failed: rank 1 ended | | |" in figures.markdown({"work": one(SECONDS, zero9="rank 1 ended")})


def test_growth_has_a_cell_for_every_size_and_rank() -> None:
    cells = [{**one(SECONDS), "size": size, "ranks": ranks} for size in ("1M", "10M") for ranks in (1, 2)]
    lines = figures.markdown({"growth": cells}).splitlines()
    assert lines[-1] == "| 10M | 1.10 (1.10–1.10) / 1.20 (1.20–1.20) | 1.10 (1.10–1.10) / 1.20 (1.20–1.20) |"  # noqa: RUF001


def test_every_variant_has_its_file_and_its_environment() -> None:
    for variant in VARIANTS.values():
        assert (ROOT / f"benchmarks/peers/{variant.file}.py").exists()
        assert not variant.home or variant.home in PINS
    assert all(any(pin.startswith("torch==") for pin in pins) for pins in PINS.values())


@pytest.mark.parametrize("other", [[9.07879, 8.95324], [9.01505, 8.79705], [float("nan"), 8.95675]])
def test_other_work_is_noticed(other: list[float]) -> None:
    same = [9.08198, 8.95675]
    outcomes = {name: Outcome(losses=same) for name in ("a", "b", "c")} | {"d": Outcome(losses=other)}
    outcomes[IDEAL] = Outcome(losses=[9.01505, 8.79705])
    compare_losses(outcomes)
    assert [name for name, outcome in outcomes.items() if outcome.failed] == ["d"]


def test_every_group_has_the_bases() -> None:
    names, tiny, huge = [*BASES, "ddp", "zero1"], 1, 10**13
    setting = {"model": {}, "batch": 1, "steps": 1}
    assert grouped(names, 1, Setting(**setting, parameters=tiny)) == (True, [names])
    assert grouped(names, 1, Setting(**setting, parameters=huge)) == (False, [[name] for name in names])
    half = next(n for n in range(1, 1000) if len(grouped(names, n, Setting(**setting, parameters=tiny))[1]) > 1)
    assert grouped(names, half, Setting(**setting, parameters=tiny)) == (True, [[*BASES, "ddp"], [*BASES, "zero1"]])
