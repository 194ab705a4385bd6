"""The variables of PyTorch's ``env://`` for a process that mpirun or srun has started."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.trace.trace_parts import JOB_VARIABLES, TASK_VARIABLES

_LOCAL_RANK: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LOCAL_SIZE: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_NODES: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 9_500
"""The ports end below PyTorch's default, 29500, and below those of outgoing connections."""


class _Task(NamedTuple):
    rank: int
    size: int


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which ``init_process_group`` finds the other ranks.

    The address and port are kept if they are set. Otherwise the address is the first node of a
    Slurm step, or this host if all ranks are on it, and the port is derived from the job's name.

    Args:
        environment: The variables that mpirun or srun has set.

    Raises:
        UsageError: They are not set, or do not tell where rank 0 is.
    """
    task = _task(environment)
    local_rank = _number(environment, _LOCAL_RANK)
    if local_rank is None and task.size > 1:
        raise UsageError(f"--from-mpi finds no local rank: none of {', '.join(_LOCAL_RANK)} is set")
    name = "-".join(environment[name] for name in JOB_VARIABLES if environment.get(name))
    port = _FIRST_PORT + zlib.crc32(f"{name}.{environment.get('SLURM_STEP_ID')}".encode()) % (
        _NUM_PORTS
    )
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.size),
        "LOCAL_RANK": str(local_rank or 0),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _address(environment, task.size),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def _task(environment: Mapping[str, str]) -> _Task:
    for size, rank in TASK_VARIABLES:
        if size == "WORLD_SIZE":
            break
        found = _number(environment, (rank,)), _number(environment, (size,))
        if found[0] is not None and found[1] is not None:
            return _Task(found[0], found[1])
    raise UsageError(
        "--from-mpi: mpirun or srun has not started this, its variables are not set; as in: "
        "mpirun -n 2 ddltrace run --from-mpi -o trace -- python train.py"
    )


def _address(environment: Mapping[str, str], size: int) -> str:
    """The host of rank 0."""
    on_one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"
    if size == 1 or on_one_node or _number(environment, _LOCAL_SIZE) == size:
        return "127.0.0.1"
    for name in _NODES:
        if environment.get(name):
            return first_node(environment[name])
    raise UsageError(
        "--from-mpi cannot tell on which host rank 0 is: set MASTER_ADDR to it for all ranks "
        "(Open MPI: mpirun -x MASTER_ADDR=HOST; MPICH: mpiexec -genv MASTER_ADDR HOST)"
    )


def first_node(nodes: str) -> str:
    """The first host of Slurm's form of a list, such as ``node[07-09,12],other``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of the first variable that is a number."""
    return next((int(v) for name in names if (v := environment.get(name, "")).isdigit()), None)
