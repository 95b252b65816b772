"""The command line of a job: the inverse of the parser, for a launcher on another machine.

The recipe, FNACCEL_SET and the options are in the job already. So the command needs none of them there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fnaccel.errors import ConfigError, LaunchError
from fnaccel.launch.job import Job
from fnaccel.launch.options import changed_options, words_of
from fnaccel.world.settings import parse_value


def options_of(job: Job) -> list[str]:
    """The options of `fnaccel launch` for a job. Fields with their default value are left out.

    Example:
        >>> options_of(Job(script="t.py", ranks=4, restarts=2, overrides={"strategy": "fsdp"}))[3:]
        ['-n', '4', '--max-restarts', '2', '--set', 'strategy=fsdp']
    """
    # the carrier of the recipe has done its part. A recipe file there would be used under the options
    carrier, unused = ("elastic", ()) if job.several else ("local", ("machine", "address"))
    options = ["--no-config", "--carrier", carrier, *words_of(job, but=("carrier", *unused))]
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


def launch_command(job: Job, python: str) -> list[str]:
    """The whole command of a launcher, with the interpreter there."""
    return [python, "-m", "fnaccel", "launch", *options_of(job), *program_of(job)]


def refuse(job: Job, carrier: str, fix: str, *, by: str | None = None, also: Sequence[str] = ()) -> None:
    """See that no option is set that a carrier can't carry: `Option.refused_by`.

    Args:
        job: the job.
        carrier: its name in the error.
        fix: for the error.
        by: the name in `Option.refused_by`, if it is another.
        also: further options that were given, and that the carrier can't carry.

    Raises:
        LaunchError: one of the options has another value than its default.
    """
    changed = changed_options(job).values()
    names = [*also, *(option.name for option in changed if (by or carrier) in option.refused_by.split())]
    if names:
        raise LaunchError(
            f"{', '.join(names)} can't be used with the carrier {carrier}",
            where=f"fnaccel launch --carrier {carrier}",
            fix=fix,
        )


def _as_text(value: Any) -> str:
    """The value as `--set` reads it back: `parse_value(_as_text(value)) == value`."""
    if isinstance(value, str):
        try:
            same = parse_value(value)
        except ConfigError:  # what YAML can't read, such as a tab
            same = None
        return value if isinstance(same, str) and same == value else json.dumps(value)
    return json.dumps(value)
