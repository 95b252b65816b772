"""The carrier `mpirun`: MPI's launcher starts the ranks, that of Open MPI, of MPICH or of Intel MPI.

No MPI library is used for collectives: `fa.start` reads the ranks from mpirun's variables.
"""

from __future__ import annotations

import subprocess

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.command_line import program_of, refuse
from fnaccel.launch.carriers.environment import carried, of_all_ranks
from fnaccel.launch.carriers.hosts import Host, check_count, ranks_of_each, read_hosts
from fnaccel.launch.job import STATIC_PORT, Job
from fnaccel.launch.request import Command, Plan, Request

_FIX = "--carrier ssh starts fnaccel's own launcher on each host, which has them"


def plan(request: Request) -> Plan:
    """One mpirun command. Options that only fnaccel's launcher has are errors.

    Raises:
        LaunchError: such an option, or hosts whose number of ranks is unknown.

    Example:
        >>> print(plan(Request(job=Job(script="t.py", ranks=2, env={"A": "1"}))).commands[0].text)
        A=1 mpirun -np 2 --bind-to none -x A python -u t.py
    """
    job = request.job
    refuse(job, "mpirun", _FIX)
    hosts = read_hosts(job.hosts) if job.hosts.given else []
    if hosts:
        check_count(hosts, job.machines)
    if any(host.gpus is not None for host in hosts):
        raise LaunchError(
            "mpirun can't choose GPUs of each host",
            where="launch.hosts",
            fix="--carrier ssh, or filters that name whole hosts",
        )
    ranks = ranks_of_each(hosts, job.ranks) if hosts else job.processes
    if ranks is None:
        raise LaunchError(
            "the number of ranks on each host is unknown",
            where="fnaccel launch --carrier mpirun",
            fix="-n 4, or a host file with lines such as: gpu1 slots=4",
        )
    variables = of_all_ranks(job)
    if len(hosts) > 1:
        variables["MASTER_ADDR"] = job.address or hosts[0].address
        variables["MASTER_PORT"] = str(job.port or STATIC_PORT)
    elif job.port is not None:
        variables["MASTER_PORT"] = str(job.port)
    names = sorted({**variables, **(carried(request.environ) if len(hosts) > 1 else {})})
    kind = flavor(request.mpi)
    options = _hydra(job, hosts, ranks) if kind == "mpich" else _open_mpi(job, hosts, ranks, names)
    python = [request.python, "-u"] if job.python else []
    words = ("mpirun", *options, *python, *program_of(job))
    total = ranks * max(1, len(hosts))
    summary = f"{total} ranks on {max(1, len(hosts))} hosts, with the options of {kind}"
    return Plan(carrier="mpirun", summary=summary, commands=(Command(words=words, env=variables),))


def flavor(version: str) -> str:
    """The family of options of an mpirun: `"openmpi"`, or `"mpich"` for MPICH and Intel MPI.

    Args:
        version: the output of `mpirun --version`.

    Example:
        >>> flavor("HYDRA build details: Version: 4.0.2"), flavor("mpirun (Open MPI) 4.1.4")
        ('mpich', 'openmpi')
    """
    text = version.lower()
    return "mpich" if any(word in text for word in ("hydra", "mpich", "intel")) else "openmpi"


def ask_version() -> str:
    """The output of `mpirun --version`. Empty if there is no mpirun."""
    try:
        return subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _open_mpi(job: Job, hosts: list[Host], ranks: int, names: list[str]) -> list[str]:
    options = ["-np", str(ranks * max(1, len(hosts)))]
    whole = not (job.hosts.names or job.hosts.include or job.hosts.exclude)
    if hosts and whole:
        options += ["--hostfile", str(job.hosts.file), "--map-by", f"ppr:{ranks}:node"]
    elif hosts:
        options += ["--host", ",".join(f"{host.address}:{ranks}" for host in hosts)]
    # by default Open MPI keeps a rank, and all of its threads, on one core
    options += ["--bind-to", "numa" if job.numa else "core" if job.affinity else "none"]
    options += [] if job.tee is None else ["--output-filename", job.tee]
    for name in names:
        options += ["-x", name]
    return options


def _hydra(job: Job, hosts: list[Host], ranks: int) -> list[str]:
    refuse(job, "mpirun", "--carrier ssh, or mpirun's own -outfile-pattern", by="mpich")
    options = ["-n", str(ranks * max(1, len(hosts)))]
    if hosts:
        options += ["-ppn", str(ranks), "-hosts", ",".join(host.address for host in hosts)]
    binding = "numa" if job.numa else "core" if job.affinity else None
    return options + ([] if binding is None else ["-bind-to", binding])
