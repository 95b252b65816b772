"""The launcher's values for a process: its rank, the number of ranks, its machine.

The variables of torchrun, mpirun and SLURM are read from a mapping: nothing here reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from fnaccel.errors import WorldError


@attrs.frozen(kw_only=True)
class Ranks:
    """The rank, size and machine of this process from the environment, before anything is started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    machines: int = 1
    source: str = "plain python"


_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def detect(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from environment variables: torchrun's names, mpirun's, SLURM's, or none.

    Raises:
        WorldError: a rank outside the world, or half of the variables.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not {"RANK", "WORLD_SIZE"} <= environ.keys():
            missing = "WORLD_SIZE" if "RANK" in environ else "RANK"
            raise WorldError(
                f"the environment sets one of RANK and WORLD_SIZE, but not {missing}",
                where="fa.start",
                fix="start with `fnaccel launch` or torchrun, or unset both",
            )
        return _ranks(environ, names, "fnaccel launch" if "FNACCEL_LAUNCHED" in environ else "torchrun")
    for names in _MPI:
        if names[0] in environ and names[1] in environ:
            return _ranks(environ, names, "mpirun")
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        return _ranks(environ, names, "srun")
    return Ranks()


def _ranks(environ: Mapping[str, str], names: tuple[str, str, str, str], source: str) -> Ranks:
    def number(name: str, default: int) -> int:
        text = environ.get(name, str(default))
        if not re.fullmatch(r"\d+", text):
            raise WorldError(
                f"{name}={text!r} is not a number", where="fa.start", fix=f"set {name} to a count"
            )
        return int(text)

    rank, size = number(names[0], 0), number(names[1], 1)
    if rank >= size:
        raise WorldError(
            f"{names[0]}={rank} is outside a world of {names[1]}={size}",
            where="fa.start",
            fix=f"ranks run from 0 to {size - 1}",
        )
    local_size = number(names[3], size)
    local_rank = number(names[2], rank % max(local_size, 1))
    machines = max(1, -(-size // max(local_size, 1)))
    machine = number("GROUP_RANK", rank // max(local_size, 1))
    return Ranks(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=machine,
        machines=machines,
        source=source,
    )


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `"node[07-09,12],gpu1" -> "node07"`."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]  # commas inside brackets do not part hosts
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
