"""The command line of a job: the inverse of the parser, for a launcher on another machine.

The recipe, FNACCEL_SET and the options are in the job already. So the command needs none of them there.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from fnaccel.errors import ConfigError, LaunchError
from fnaccel.launch.job import Job
from fnaccel.world.settings import parse_value

_VALUES = {
    "threads": "--threads",
    "grace": "--timeout-grace",
    "restarts": "--max-restarts",
    "watchdog": "--watchdog",
    "min_ranks": "--min-ranks",
    "gpus": "--gpus",
    "role": "--role",
    "interval": "--monitor-interval",
    "tee": "--tee",
    "nccl": "--nccl",
}
_SWITCHES = {
    "cpu": "--cpu",
    "tpu": "--tpu",
    "affinity": "--cpu-affinity",
    "numa": "--numa",
    "quiet": "--quiet",
    "debug": "--debug",
}


def options_of(job: Job, *, ranks: int | None, carrier: str = "local") -> list[str]:
    """The options of `fnaccel launch` for a job. Fields with their default value are left out.

    Args:
        job: the job.
        ranks: processes on each machine. None: the accelerators there.
        carrier: of the command.

    Example:
        >>> options_of(Job(script="t.py", restarts=2, overrides={"strategy": "fsdp"}), ranks=4)[3:]
        ['-n', '4', '--max-restarts', '2', '--set', 'strategy=fsdp']
    """
    # the carrier of the recipe has done its part. A recipe file there would be used under the options
    options = ["--no-config", "--carrier", carrier]
    if ranks is not None:
        options += ["-n", str(ranks)]
    if job.several:
        least, most = job.least_machines, job.machines
        options += ["--nnodes", str(most) if least == most else f"{least}:{most}"]
        options += [] if job.machine is None else ["--node-rank", str(job.machine)]
        options += ["--master-addr", job.address]
    if job.port is not None:
        options += ["--master-port", str(job.port)]
    default = Job()
    for field, flag in _VALUES.items():
        value = getattr(job, field)
        if value != getattr(default, field):
            options += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    options += [flag for field, flag in _SWITCHES.items() if getattr(job, field)]
    if not job.python:
        options.append("--no-python")
    if job.rdzv:
        options += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in job.rdzv.items())]
    for name, value in job.env.items():
        options += ["--env", f"{name}={value}"]
    for field, value in job.overrides.items():
        options += ["--set", f"{field}={_as_text(value)}"]
    return options


def program_of(job: Job) -> list[str]:
    """The script or the module, and its arguments."""
    return ["-m", job.module, *job.args] if job.module is not None else [str(job.script), *job.args]


def python_command(job: Job, python: str) -> list[str]:
    """The command of one rank without the launcher."""
    if not job.python:
        return program_of(job)
    return [python, *program_of(job)]


def launch_command(job: Job, python: str, *, ranks: int | None, carrier: str = "local") -> list[str]:
    """The whole command of a launcher.

    Args:
        job, ranks, carrier: as for `options_of`.
        python: the interpreter there.
    """
    return [
        python, "-m", "fnaccel", "launch", *options_of(job, ranks=ranks, carrier=carrier), *program_of(job),
    ]  # fmt: skip


def refuse(job: Job, fields: dict[str, str], carrier: str, fix: str) -> None:
    """See that options that only fnaccel's own launcher has are not set.

    Args:
        job: the job.
        fields: names of fields of the job, and their options.
        carrier: the carrier that has no such option.
        fix: for the error.

    Raises:
        LaunchError: one of the fields has another value than its default.
    """
    default = Job()
    given = [flag for field, flag in fields.items() if getattr(job, field) != getattr(default, field)]
    if given:
        raise LaunchError(
            f"{', '.join(given)} can't be used with the carrier {carrier}",
            where=f"fnaccel launch --carrier {carrier}",
            fix=fix,
        )


OWN_OPTIONS = {
    "restarts": "--max-restarts",
    "min_ranks": "--min-ranks",
    "min_machines": "--nnodes MIN:MAX",
    "rdzv": "--rdzv-conf",
    "interval": "--monitor-interval",
}
"""Fields that need fnaccel's launcher around the ranks."""


def at_address(job: Job, *, machines: int, machine: int | None, address: str) -> Job:
    """The job of one of several machines. A job of one machine keeps no address."""
    if machines == 1:
        return attrs.evolve(job, machines=1, min_machines=None, machine=0)
    return attrs.evolve(job, machines=machines, machine=machine, address=address)


def _as_text(value: Any) -> str:
    """The value as `--set` reads it back: `parse_value(_as_text(value)) == value`."""
    if isinstance(value, str):
        try:
            same = parse_value(value)
        except ConfigError:  # what YAML can't read, such as a tab
            same = None
        return value if isinstance(same, str) and same == value else json.dumps(value)
    return json.dumps(value)
