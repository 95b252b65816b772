"""`detect` reads the ranks from any launcher's variables; a pure function over dicts."""

from __future__ import annotations

import pytest

from fnaccel.errors import WorldError
from fnaccel.world.launched import Ranks, detect, first_host


def strings(**values):
    return {name: str(value) for name, value in values.items()}


def test_plain_python_is_one_rank():
    assert detect({}) == Ranks()
    assert detect({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) == Ranks()


TORCHRUN = strings(
    RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1, TORCHELASTIC_USE_AGENT_STORE=True
)
PLACE = {"rank": 5, "size": 8, "local_rank": 1, "local_size": 4, "machine": 1, "machines": 2}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (TORCHRUN, "torchrun"),
        ({**TORCHRUN, "FNACCEL_LAUNCHED": "1"}, "fnaccel launch"),
        (
            strings(
                OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8, OMPI_COMM_WORLD_LOCAL_RANK=1,
                OMPI_COMM_WORLD_LOCAL_SIZE=4,
            ),
            "mpirun",
        ),
        (
            strings(
                MV2_COMM_WORLD_RANK=5, MV2_COMM_WORLD_SIZE=8, MV2_COMM_WORLD_LOCAL_RANK=1,
                MV2_COMM_WORLD_LOCAL_SIZE=4,
            ),
            "mpirun",
        ),
        (strings(PMI_RANK=5, PMI_SIZE=8, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4), "mpirun"),
        (
            strings(SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8, SLURM_LOCALID=1, SLURM_NTASKS_PER_NODE=4),
            "srun",
        ),
    ],
)  # fmt: skip
def test_every_launcher_is_read(environ, source):
    assert detect(environ) == Ranks(**PLACE, source=source)


def test_torchruns_names_go_before_those_of_an_outer_launcher():
    outer = strings(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1, SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=1)
    assert detect(outer | TORCHRUN).rank == 5


def test_local_numbers_follow_where_they_are_not_said():
    assert detect(strings(RANK=1, WORLD_SIZE=2)) == Ranks(
        rank=1, size=2, local_rank=1, local_size=2, machine=0, machines=1, source="torchrun"
    )
    found = detect(strings(RANK=5, WORLD_SIZE=6, LOCAL_WORLD_SIZE=2))
    assert (found.local_rank, found.machine, found.machines) == (1, 2, 3)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "but not RANK"),
        (strings(RANK=2, WORLD_SIZE=2), "RANK=2 is outside a world of WORLD_SIZE=2"),
        (strings(RANK="a", WORLD_SIZE=2), "RANK='a' is not a number"),
        (strings(RANK=0, WORLD_SIZE=-1), "WORLD_SIZE='-1' is not a number"),
        (strings(PMI_RANK=9, PMI_SIZE=8), "PMI_RANK=9 is outside"),
    ],
)
def test_variables_that_contradict_each_other(environ, message):
    with pytest.raises(WorldError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("node[07-09,12],gpu1", "node07"),
        ("node[3,5]", "node3"),
        ("gpu1,node[07-09]", "gpu1"),
        ("rack1-node[001-100].cluster", "rack1-node001.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
