"""The environment read, and refused in words where it contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import variables
from distributedtorch.launch.place import Place, find

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_no_variables_is_one_process():
    assert find({}) == Place(rank=0, world=1, local_rank=0, local_world=1, launcher="none", run_folder=None)


def test_torchrun_and_dtorch_are_told_apart_by_the_run_folder():
    assert find(TORCHRUN) == Place(rank=3, world=4, local_rank=1, local_world=2, launcher="torchrun", run_folder=None)
    ours = find(TORCHRUN | {"DISTRIBUTEDTORCH_RUN": "/run"})
    assert (ours.launcher, ours.run_folder) == ("dtorch", Path("/run"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": "4"}, "RANK is 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "0"}, "RANK is 3"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_a_contradiction_is_refused(change, words):
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(LaunchError, match="do: ") as refused:
        find(environ)
    assert words in str(refused.value)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-12@1",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "7"}
BATCH = {  # the shell of sbatch
    "SLURM_JOB_ID": "12",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SRUN = BATCH | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "12.0"}
PROXY = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
INTERACTIVE = SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)}


@pytest.mark.parametrize(
    ("environ", "launcher", "job"),
    [
        (OPEN_MPI, "mpirun", "mpirun-prterun-host-12_1"),
        (MPICH, "mpirun", "mpirun-7"),
        (SRUN, "srun", "srun-12.0"),
        (SRUN | PMI2, "srun", "srun-12.0"),
        (PROXY | OPEN_MPI, "mpirun", "mpirun-prterun-host-12_1"),
        (PROXY | MPICH, "mpirun", "mpirun-7"),
        (OPEN_MPI | TORCHRUN, "torchrun", ""),
        (SRUN | TORCHRUN, "torchrun", ""),
        (BATCH, "none", ""),
        ({name: value for name, value in BATCH.items() if "PROCID" not in name}, "none", ""),
        (INTERACTIVE, "none", ""),
        (
            SRUN
            | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
            | {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
            "none",
            "",
        ),
    ],
)
def test_each_starter_is_recognised(environ, launcher, job):
    place = find(environ)
    assert (place.launcher, place.job) == (launcher, job)
    if launcher != "none":
        assert (place.rank, place.world, place.local_rank, place.local_world) == (3, 4, 1, 2)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_RANK is 3"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 5"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=None"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID=None"),
        ({"PMIX_RANK": "1"}, "nothing that says how many processes there are"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two'"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,1"}, "SLURM_LOCALID is 1"),
    ],
)
def test_a_contradiction_of_a_starter_is_refused(environ, words):
    with pytest.raises(LaunchError, match="do: ") as refused:
        find(environ)
    assert words in str(refused.value)


def test_a_starter_without_a_job_number_is_told_by_its_process():
    environ = {name: value for name, value in MPICH.items() if name != "PMI_JOBID"}
    assert find(environ).job == find(environ).job != find(MPICH).job


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-005,9],login", "gpu003"),
        ("a-b.c[7,9-12]", "a-b.c7"),
        ("rack[2-3]n[01-04].site", "rack2n01.site"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert variables.first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "[", "gpu[1", "gpu]1", ",a", "gpu[a-b]"])
def test_a_list_that_cannot_be_read_is_refused(hosts):
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        variables.first_host(hosts)


@pytest.mark.parametrize(("counts", "node", "here"), [("2(x3),1", "2", "2"), ("2(x3),1", "3", "1"), ("4", "1", "")])
def test_the_tasks_of_a_node(counts, node, here):
    assert variables._tasks_here(counts, node) == here


def test_the_port_follows_from_job_and_step():
    ports = {variables.slurm_port(SRUN | {"SLURM_JOB_ID": str(job)}) for job in range(200)}
    assert len(ports) > 190
    assert all(20_000 <= port < 32_000 for port in ports)
    assert variables.slurm_port(SRUN) == variables.slurm_port(SRUN | {"SLURM_PROCID": "0"})
