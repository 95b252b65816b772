"""The carrier `slurm`: a job script, which sbatch gets.

The script starts a launcher on each node, or with `srun: rank` the ranks themselves. Before the time ends,
SLURM sends SIGUSR1 to the script. The ranks save, and the script puts the job back into the queue.
"""

from __future__ import annotations

import shlex
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.command_line import (
    launch_command,
    program_of,
    refuse,
)
from fnaccel.launch.carriers.environment import of_all_ranks
from fnaccel.launch.job import STATIC_PORT
from fnaccel.launch.request import Command, Plan, Request

SCRIPT = "fnaccel-job.sh"
"""The name of the job script, unless the section has `script`."""

_OURS = ("setup", "script", "srun", "srun-options", "requeue")
_DEFAULTS = {"job-name": "fnaccel", "output": "%x-%j.log", "open-mode": "append", "signal": "B:USR1@120"}
_ADDRESS = "$MASTER_ADDR"
_NUMBER = "$SLURM_NODEID"
_RUN = r"""
# SLURM signals this shell. srun passes the signal on, and the ranks save and end with code 75
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
{srun} &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # a signal has ended the wait, and not srun
    wait "$step"
    code=$?
done
"""
_REQUEUE = """if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


def plan(request: Request) -> Plan:
    """A job script, and the sbatch command for it.

    Raises:
        LaunchError: `srun: rank` without a number of ranks, or with options that only fnaccel's launcher has.

    Example:
        >>> result = plan(Request(job=Job(script="t.py", ranks=4, slurm={"partition": "gpu"})))
        >>> result.commands[0].text
        'sbatch fnaccel-job.sh'
    """
    path = str(request.job.slurm.get("script", SCRIPT))
    text = job_script(request)
    nodes = "1 node" if request.job.machines == 1 else f"{request.job.machines} nodes"
    summary = f"a job script for {nodes}"
    return Plan(
        carrier="slurm", summary=summary, files={path: text}, commands=(Command(words=("sbatch", path)),)
    )


def job_script(request: Request) -> str:
    """The text of the job script."""
    job, section = request.job, request.job.slurm
    unit = section.get("srun", "node")
    if unit not in ("node", "rank"):
        raise LaunchError(f"srun: {unit}", where="launch.slurm.srun", fix="srun: node, or srun: rank")
    parts = ["#!/bin/bash", *_directives(request, unit), ""]
    parts += section.get("setup", ())
    parts += ["cd " + shlex.quote(request.folder), "unset FNACCEL_SET  # it is in the options below"]
    if job.machines > 1 or unit == "rank":
        hosts = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
        parts.append(f'export MASTER_ADDR="$({hosts} | head -n 1)"')
    srun = _ranks_command(request) if unit == "rank" else _launchers_command(request)
    parts.append(_RUN.format(srun=srun).strip("\n"))
    if section.get("requeue", True):
        parts.append(_REQUEUE.rstrip("\n"))
    return "\n".join([*parts, 'exit "$code"', ""])


def _directives(request: Request, unit: str) -> list[str]:
    """The `#SBATCH` lines: those of the job, and those of the section, which go over them."""
    job, section = request.job, request.job.slurm
    tasks = 1 if unit == "node" else job.ranks
    options: dict[str, Any] = {**_DEFAULTS, "nodes": str(job.machines), "ntasks-per-node": str(tasks)}
    if job.min_machines is not None:
        options["nodes"] = f"{job.least_machines}-{job.machines}"
        options["no-kill"] = True  # the job outlives a node
    chosen = any(name.startswith(("gpus", "gres", "tres")) for name in section)
    if not (job.cpu or chosen) and job.ranks is not None:
        options["gpus-per-node"] = str(job.ranks)
    if job.threads is not None:
        each = job.threads * (job.ranks or 1) if unit == "node" else job.threads
        options["cpus-per-task"] = str(each)
    options |= {name: value for name, value in section.items() if name not in _OURS}
    if section.get("requeue", True):
        options["requeue"] = True
    return [f"#SBATCH {_directive(name, value)}" for name, value in options.items() if value is not False]


def _directive(name: str, value: object) -> str:
    if value is True or value is None:
        return f"--{name}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"--{name}={shlex.quote(text)}"


def _launchers_command(request: Request) -> str:
    """srun with one launcher on each node. Its shell on the node knows the number of the node."""
    job = request.job
    job = attrs.evolve(job, machine=_NUMBER, address=job.address or _ADDRESS)
    words = launch_command(job, request.python)
    line = " ".join(f'"{word}"' if word in (_ADDRESS, _NUMBER) else shlex.quote(word) for word in words)
    return _srun(request) + f" bash -c {shlex.quote('exec ' + line)}"


def _ranks_command(request: Request) -> str:
    """srun with one process for each rank, which finds its place in SLURM's variables."""
    job = request.job
    fix = "srun: node, which starts fnaccel's launcher on each node"
    refuse(job, "slurm", fix, by="srun")
    if job.ranks is None:
        raise LaunchError(
            "srun: rank, and the number of ranks on a node is unknown", where="launch.slurm.srun", fix="-n 4"
        )
    variables = {"MASTER_PORT": str(job.port or STATIC_PORT), **of_all_ranks(job)}
    exports = [f"{name}={value}" for name, value in variables.items()]
    python = [request.python, "-u"] if job.python else []
    return f"{_srun(request)} {shlex.join(['env', *exports, *python, *program_of(job)])}"


def _srun(request: Request) -> str:
    more = request.job.slurm.get("srun-options", "")
    words = list(more) if isinstance(more, list | tuple) else shlex.split(str(more))
    # a node that fails ends the others, unless the launchers go on without it
    failure = "--kill-on-bad-exit=1" if request.job.min_machines is None else "--kill-on-bad-exit=0"
    return shlex.join(["srun", failure, *map(str, words)])
