"""The variables of PyTorch from those of mpirun and srun."""

from __future__ import annotations

import pytest

from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.mpi_ranks import first_node, torch_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "3117613057",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
# The helpers of MPICH's mpiexec are tasks of Slurm, one for each node.
MPICH_IN_SLURM = {**SLURM, **MPICH, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, SLURM, MPICH_IN_SLURM])
def test_ranks_are_those_of_the_launcher(variables: dict[str, str]) -> None:
    found = torch_variables({**variables, "MASTER_ADDR": "head", "RANK": "9", "WORLD_SIZE": "10"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert found["MASTER_ADDR"] == "head"
    assert 20_000 <= int(found["MASTER_PORT"]) < 29_500
    given = torch_variables({**variables, "MASTER_ADDR": "head", "MASTER_PORT": "5"})
    assert given["MASTER_PORT"] == "5"


def test_the_address_is_that_of_rank_0() -> None:
    assert torch_variables(SLURM)["MASTER_ADDR"] == "gpu07"
    assert torch_variables({**SLURM, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    assert torch_variables({**MPICH, "MPI_LOCALNRANKS": "4"})["MASTER_ADDR"] == "127.0.0.1"
    for variables in (OPEN_MPI, MPICH):
        with pytest.raises(UsageError, match="set MASTER_ADDR"):
            torch_variables(variables)


def test_all_ranks_of_a_job_get_one_port_and_other_jobs_another() -> None:
    def port(**others: str) -> str:
        return torch_variables({**SLURM, **others})["MASTER_PORT"]

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0")
    assert len({port(), port(SLURM_JOB_ID="78"), port(SLURM_STEP_ID="1")}) == 3


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"PMI_RANK": "x"}])
def test_without_mpirun_the_fix_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="mpirun -n 2 ddltrace run --from-mpi"):
        torch_variables(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("a,b", "a"),
        ("gpu[07-09,12],other", "gpu07"),
        ("rack[1-2]n[05,7]-ib,x", "rack1n05-ib"),
        ("n[3]", "n3"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
