"""Scripts written without knowing the library, two lines added: same weights at every world under every plan."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.conformance.cases import difference

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """A user's script and the second of the two lines."""

    name: str
    after: str
    """The line it is put after."""
    call: str
    exact: bool = True


SCRIPTS = [
    Script(
        "hf",
        "scheduler = get_linear_",
        "model, optimizer, loader, scheduler = dt.distribute(model, optimizer, loader, scheduler)",
    ),
    Script(
        "gan", "optD = ", "netG, netD, optG, optD, loader = dt.distribute(netG, netD, optG, optD, loader)", exact=False
    ),
    Script("ema", "sched = ", "model, opt, train_loader, sched = dt.distribute(model, opt, train_loader, sched)"),
    Script("stream", "optimizer = ", "model, optimizer, train_loader = dt.distribute(model, optimizer, train_loader)"),
    Script("accumulate", "sched = ", "model, opt, train_dl, sched = dt.distribute(model, opt, train_dl, sched)"),
]

SOON = ("ema", "accumulate")
"""What `make test` has time for; the others are in `make test-long`."""


def two_lines(script: Script) -> str:
    """The script with an import and a call added."""
    lines = (HERE / f"{script.name}.py").read_text().splitlines()
    at = next(k for k, line in enumerate(lines) if line.strip().startswith(script.after))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    first = next(k for k, line in enumerate(lines) if line.startswith("import "))
    return "\n".join(
        [
            *lines[:first],
            "import distributedtorch as dt",
            *lines[first : at + 1],
            indent + script.call,
            *lines[at + 1 :],
            "",
        ]
    )


def train(path: Path, folder: Path, world: int = 0, plan: str = "ddp") -> dict[str, torch.Tensor]:
    """What a script has trained, by plain python or by `world` ranks under a plan."""
    out = folder / "weights.pt"
    words = [str(path), "--out", str(out), "--double"]
    ended: subprocess.CompletedProcess[str]
    if world:
        ended = forked.run(world, *words, cwd=folder, timeout=110, environ={"DISTRIBUTEDTORCH_PLAN": plan})
    else:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        ended = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=110, check=False
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    saved = torch.load(out, weights_only=True)
    if isinstance(next(iter(saved.values())), dict):
        return {f"{part}.{name}": value for part, state in saved.items() for name, value in state.items()}
    return saved  # type: ignore[no-any-return]


def runs() -> list[Any]:
    """A covering few; `DISTRIBUTEDTORCH_TEST_ALL=1` runs every script at 1, 2, 3 workers under every plan."""
    if os.environ.get("DISTRIBUTEDTORCH_TEST_ALL"):
        return [(s, world, plan) for s in SCRIPTS for world in (1, 2, 3) for plan in ("ddp", "zero1", "zero2")]
    few = [(s, 2 + k % 2, ("zero2", "ddp", "zero1")[k % 3]) for k, s in enumerate(SCRIPTS)]
    return [pytest.param(*one, marks=[] if one[0].name in SOON else pytest.mark.long) for one in few]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(lambda name: train(HERE / f"{name}.py", folder))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("script", "world", "plan"), runs(), ids=lambda value: getattr(value, "name", value))
def test_two_added_lines(
    script: Script, world: int, plan: str, truth: Callable[[str], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = tmp_path / f"{script.name}.py"
    path.write_text(two_lines(script))
    found = train(path, tmp_path, world, plan)
    if script.exact:
        gap, where = difference(truth(script.name), found)
        assert gap <= 1e-9, f"{where} differs by {gap:.1e}"
    else:  # noise is drawn in the loop: another draw on every rank
        assert all(torch.isfinite(value).all() for value in found.values())
