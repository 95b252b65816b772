"""The environment of each rank: a pure function of the job. `fnaccel.world.world.detect` reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fnaccel.launch import affinity, tpu
from fnaccel.launch.job import Job
from fnaccel.world import flags, settings

_OF_ANOTHER_LAUNCH = (
    flags.VARIABLE,
    settings.VARIABLE,  # the launcher has read it, and its own options go over it
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "FNACCEL_JOB",
    "FNACCEL_LAUNCHED",
    "FNACCEL_RESTART_COUNT",
)


def variables(
    job: Job,
    local_rank: int,
    *,
    port: int,
    environ: Mapping[str, str],
    interface: str | None = None,
    restarts: int = 0,
    several: bool = False,
    cores: int | None = None,
    presets: Mapping[str, str] | None = None,
    number: str = "",
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
        job: the job that is started.
        local_rank: the number of the process on this machine.
        port: the port of the ranks' store.
        environ: the launcher's own environment. Variables of an outer launch are dropped.
        interface: for gloo, if ranks are on several machines and the user named none.
        restarts: the number of earlier starts of this job.
        several: whether the job has several machines, which share a store that a launcher keeps.
        cores: the number of cores of this machine. Counted by default.
        presets: variables under those of the job: see `presets.py`.
        number: of the job, if no other job of this machine has it.

    Example:
        >>> variables(Job(script="train.py", ranks=2), 1, port=29500, environ={})["RANK"]
        '1'
    """
    new_environ = {name: value for name, value in environ.items() if not name.startswith(_OF_ANOTHER_LAUNCH)}
    new_environ |= {**(presets or {}), **job.visible}
    new_environ |= {
        "RANK": str(job.rank(local_rank)),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.processes),
        "GROUP_RANK": str(job.machine or 0),
        "MASTER_ADDR": job.store_address,
        "MASTER_PORT": str(port),
        "FNACCEL_LAUNCHED": "1",
        "FNACCEL_RESTART_COUNT": str(restarts),
        **flags.pack(job.overrides),
    }
    if job.role is not None:
        rank, size = str(job.rank(local_rank)), str(job.size)
        new_environ |= {"ROLE_NAME": job.role, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size}
    if number and not several:
        new_environ["FNACCEL_JOB"] = number
    if several:
        # the coordinator process keeps the store, and each attempt has keys of its own in it
        new_environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    # on one machine the launcher watches the ranks, on several machines a thread of each rank does
    new_environ["FNACCEL_WATCHDOG"] = f"{job.watchdog if several else 0:g}"
    new_environ["FNACCEL_LAUNCHER_WATCHDOG"] = f"{0 if several else job.watchdog:g}"
    if job.cpu:
        new_environ["FNACCEL_DEVICE"] = "cpu"
    if job.tpu:
        new_environ.update(tpu.variables(environ))
    if interface is not None:
        new_environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if job.threads is not None:
        new_environ["OMP_NUM_THREADS"] = str(job.threads)
    elif job.affinity:
        new_environ["OMP_NUM_THREADS"] = str(len(affinity.cores_of(local_rank, job.processes)))
    elif job.processes > 1:  # a single process has the machine to itself: PyTorch's own choice is right
        each = (cores or _cores()) // job.processes
        new_environ.setdefault("OMP_NUM_THREADS", str(max(1, each)))
    return new_environ


def _cores() -> int:
    """The number of cores that this process may use, if the platform lists them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
