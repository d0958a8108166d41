"""Real runs of a plain script: accepted under every sync, and every sabotaged twin caught for the right reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributedtorch.verify import record
from distributedtorch.verify.measure import Job, alone, compare, together
from distributedtorch.verify.runs import Run
from distributedtorch.verify.verdict import Verdict

HERE = Path(__file__).parent
TRAIN, SABOTAGE = str(HERE / "train.py"), str(HERE / "sabotage.py")
STEPS = 9
JOB = Job(command=(TRAIN,), plan="ddp", workers=2, steps=STEPS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are tiny; threads that wait for each other cost most of the time on few cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The script as it is and with rows reversed: the same for every plan without words that change the result."""
    folder = tmp_path_factory.mktemp("one")
    return alone(JOB, folder / "truth"), alone(JOB, folder / "noise", reverse=True)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DISTRIBUTEDTORCH_PLAN", record.FOLDER, record.ROWS, record.PLAN):
        monkeypatch.delenv(name, raising=False)


def dtorch_verify(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributedtorch", "verify", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_truth_is_the_plain_script(one_process: tuple[Run, Run], tmp_path: Path) -> None:
    """Recording changes no bit of what `python train.py` computes."""
    plain = tmp_path / "plain.py"
    source = Path(TRAIN).read_text()
    stop = f"if scheduler.last_epoch == {STEPS}: sys.exit(torch.save(model.state_dict(), 'plain.pt'))"
    plain.write_text(source.replace("scheduler.step()\n", f"scheduler.step()\n        {stop}\n"))
    subprocess.run([sys.executable, plain], check=True, timeout=60)
    expected = torch.load(tmp_path / "plain.pt", weights_only=True)
    final = one_process[0].final
    assert final.keys() == expected.keys()
    assert all(torch.equal(final[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("plan", "workers"), [pytest.param("ddp", 2, marks=pytest.mark.long), ("zero1", 3)])
def test_accepts(one_process: tuple[Run, Run], tmp_path: Path, plan: str, workers: int) -> None:
    job = replace(JOB, plan=plan, workers=workers)
    verdict = compare(job, *one_process, together(job, tmp_path / "plan"))
    assert verdict.same, verdict
    assert verdict.steps == STEPS
    assert len(verdict.parameters) == 11


FAULTS = {
    "weights_by_rank": ("ddp", 1, "counted equally"),
    "local_clip": ("zero2", 1, "clipping by the norm of this rank's gradient"),
    "repeated_samples": ("ddp", 1, "samples repeated or lost"),
    "multiplied_scheduler": ("zero1", 3, "scheduler is stepped more or less often"),
}
SOON = ("weights_by_rank",)
"""What `make test` has time for; the others are in `make test-long`."""


@pytest.mark.parametrize(
    "fault", [*SOON, *(pytest.param(one, marks=pytest.mark.long) for one in FAULTS if one not in SOON)]
)
def test_catches(one_process: tuple[Run, Run], tmp_path: Path, fault: str) -> None:
    plan, step, reason = FAULTS[fault]
    job = replace(JOB, plan=plan, command=(SABOTAGE, fault, TRAIN))
    verdict = compare(job, *one_process, together(job, tmp_path / "plan"))
    print(verdict)
    assert verdict.fault is not None
    assert (verdict.fault.step, reason in verdict.fault.reasons[0]) == (step, True), verdict


@pytest.mark.long
def test_unseeded_order_is_named(tmp_path: Path) -> None:
    job = replace(JOB, command=(TRAIN, "unseeded"))
    one, two = alone(job, tmp_path / "truth"), alone(job, tmp_path / "noise", reverse=True)
    verdict: Verdict = compare(job, one, two, one)
    assert verdict.fault is not None
    assert "order of the data comes from an unseeded source" in verdict.fault.reasons[0], verdict


def test_the_command_on_a_short_script_with_dropout() -> None:
    plan = ("--plan", "zero2,accumulate=2")
    run = dtorch_verify(*plan, "--workers", 2, "--steps", 50, TRAIN, "dropout", "adam", "short")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "same result: 2 steps" in run.stdout
    assert "dropout set to 0 in all runs: drop (0.5)" in run.stdout
    assert "the script ended by itself after 2 of 50 steps" in run.stdout


def test_a_script_that_raises_is_shown() -> None:
    run = dtorch_verify(TRAIN, "raise", "--workers", 2, "--plan", "ddp")
    assert run.returncode == 2
    assert "ValueError: no more disk quota" in run.stderr
    assert "ended in one process with code 1" in run.stderr
