"""One script, started in every way, ends with the same weights; a rank that fails under mpirun ends all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TRAIN, OWN, JOB = (Path(__file__).with_name(name) for name in ("train.py", "own_group.py", "job.py"))
MPIRUN = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SLURM = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_STEP_NODELIST": "node[7-9]", "SLURM_STEP_TASKS_PER_NODE": "2"}

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The weights of one process."""
    out = tmp_path_factory.mktemp("one") / "weights"
    subprocess.run([sys.executable, TRAIN, out], cwd=out.parent, check=True, capture_output=True, timeout=60)
    return load_file(out)


def same(path, weights):
    found = load_file(path)
    assert found.keys() == weights.keys()
    return all(torch.allclose(found[name], weights[name], rtol=1e-10, atol=1e-12) for name in weights)


@pytest.mark.parametrize(
    ("command", "source"),
    [
        pytest.param([sys.executable, TRAIN, "weights", "2"], "call", marks=pytest.mark.long),
        ([sys.executable, "-m", "distributedtorch", "run", "--workers", "2", TRAIN, "weights"], "command line"),
        ([sys.executable, *TORCHRUN, TRAIN, "weights"], "torchrun"),
        pytest.param([*MPIRUN, sys.executable, TRAIN, "weights"], "mpirun", marks=needs_mpirun),
    ],
)
def test_the_weights_are_those_of_one_process(command, source, one_process, tmp_path):
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"distributedtorch: 2 workers ({source}) · " in done.stderr
    assert done.stdout == "world 2\n"
    assert same(tmp_path / "weights", one_process)


def test_the_variables_of_srun_lead_to_the_same_weights(one_process, tmp_path):
    tasks = [
        subprocess.Popen(
            [sys.executable, TRAIN, "weights"],
            cwd=tmp_path,
            env={**os.environ, **SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=60) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "distributedtorch: 2 workers (srun) · " in said[0][1]
    assert [out for out, _ in said] == ["world 2\n", ""]
    assert same(tmp_path / "weights", one_process)
    assert not list(tmp_path.glob("distributedtorch-*"))


@needs_mpirun
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise-lingering", r"failed at .* in explode\(\) \(step 5\)(?s:.*)ValueError: a bad sample"),
        pytest.param("exit", r"ends with code 3 at .* in fault\(\)", marks=pytest.mark.long),
    ],
)
def test_a_failing_rank_ends_all_under_mpirun(start, fault, words):
    run = start("-c", f"import os; os.execvp('mpirun', {[*MPIRUN, sys.executable, str(JOB), fault, '1']!r})")
    assert run.end() != 0
    assert run.seconds_since_fault() < 10  # 3 s of ours for a thread that lingers, the rest is mpirun's
    assert re.search(f"rank 1 of 2 on .* {words}", run.err), run.err
    assert "rank 0 of 2 on" not in run.err or "ended because another rank did" in run.err
    assert run.gone_within(1)


@pytest.mark.long
def test_torchrun_shows_an_error_of_all_ranks_once(start):
    run = start(*TORCHRUN, JOB, "refused", "-1")
    assert run.end() != 0
    assert run.err.count("no word of a plan") == 1 and "core/plan.py" not in run.err


DTORCH = ["-m", "distributedtorch", "run", "--workers", "2"]


@pytest.mark.parametrize(
    ("starter", "words"),
    [
        pytest.param(TORCHRUN, ["ddp"], marks=pytest.mark.long),
        (TORCHRUN, ["zero3"]),
        (DTORCH, ["zero3"]),
        pytest.param(DTORCH, ["ddp", "early"], marks=pytest.mark.long),
        pytest.param([], ["zero1", "call"], marks=pytest.mark.long),
    ],
    ids=lambda given: "-".join(given[-2:]),
)
def test_a_group_and_a_wrapper_of_the_scripts_own_are_adopted(starter, words, one_process, tmp_path):
    command = [sys.executable, *starter, OWN, "weights", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the script's own process group is used (2 ranks, cpu:gloo") == 1
    assert done.stderr.count("DistributedDataParallel is taken off Sequential") == 1
    assert same(tmp_path / "weights", one_process)
