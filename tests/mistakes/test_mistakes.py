"""Every script of the table gives the result of one process on every rank, or is refused in words; none is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.mistakes.table import Script, scripts

ALONE = [script for script in scripts() if script.alone]


def told(script: Script, text: str) -> bool:
    """Whether a refusal says what it should, in the three parts of one."""
    return all(fragment in text for fragment in (*script.says, "needed:", "do:"))


def wrong(script: Script, row: dict[str, Any]) -> str:
    """What is wrong with what came of a script on one rank; empty: nothing."""
    if row["truth"]:
        return f"does not run in one process: {row['truth']}"
    if script.says:
        return "" if told(script, row["said"]) else f"not refused as it should be: {row['said'] or row['gap']}"
    return row["said"] or ("" if row["gap"] <= 1e-9 else f"{row['where']} differs by {row['gap']:.1e}")


def rows(world: int, folder: Path, *words: str) -> list[dict[str, Any]]:
    """What every rank says of every script."""
    ended = forked.run(world, "tests.mistakes.pool", str(folder), *words, cwd=folder, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(row) for rank in range(world) for row in (folder / f"{rank}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "plans"),
    [
        (2, "ddp;zero3"),
        pytest.param(2, "zero2", marks=pytest.mark.long),
        pytest.param(3, "ddp;zero2;zero3", marks=pytest.mark.long),
    ],
)
def test_right_or_refused(world: int, plans: str, tmp_path: Path) -> None:
    table = {script.name: script for script in scripts()}
    found = rows(world, tmp_path, plans)
    expected = [
        (name, plan)
        for plan in plans.split(";")
        for name, script in table.items()
        if not script.alone and plan in script.plans and world in script.worlds
    ]
    assert sorted((row["name"], row["plan"]) for row in found) == sorted(expected * world)
    faults = [(row["name"], row["plan"], fault) for row in found if (fault := wrong(table[row["name"]], row))]
    assert not faults, "\n".join(f"{name} under {plan}: {fault}" for name, plan, fault in faults)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", ALONE, ids=lambda script: script.name.replace(" ", "-"))
def test_refused_where_it_ends_the_job(script: Script, tmp_path: Path) -> None:
    words = (str(tmp_path), script.plans[0], script.name)
    ended = forked.run(2, "tests.mistakes.pool", *words, cwd=tmp_path, timeout=100)
    said = [json.loads(row)["said"] for path in tmp_path.glob("*.jsonl") for row in path.read_text().splitlines()]
    assert any(told(script, text) for text in [*said, ended.stderr]), ended.stderr + "\n".join(said)


def test_names_tell_scripts_apart() -> None:
    names = [script.name for script in scripts()]
    assert len(names) == len(set(names))


def test_a_wrong_result_and_a_missing_refusal_are_seen() -> None:
    right = Script(name="right", body="", before="")
    refused = Script(name="refused", body="", before="", says=("lr",))
    row = {"truth": "", "said": "", "gap": 1e-3, "where": "0.weight"}
    assert wrong(right, row) and wrong(refused, row)
    assert wrong(refused, {**row, "said": "lr is wrong"}), "an error without its three parts"
    assert not wrong(refused, {**row, "said": "lr is wrong\n  needed: x\n  do: y"})
    assert wrong(right, {**row, "gap": float("nan")})
