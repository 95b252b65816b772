"""The carrier `tpu`: commands for TPU VMs and pods, through gcloud. Not run on hardware.

With `--worker all` a command runs on each host of a pod. One process on each host drives its chips.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.command_line import options_of, program_of, refuse
from fnaccel.launch.request import Command, Plan, Request
from fnaccel.launch.sections import TpuVmRecipe


def plan(request: Request) -> Plan:
    """One gcloud command for each name. Its shell installs, runs the commands, and starts the launcher.

    Raises:
        LaunchError: there is no name or no zone, a file of commands does not exist, or machines are counted.

    Example:
        >>> place = TpuVmRecipe(name="vm", zone="us-central2-b", folder="~/gpt")
        >>> print(plan(Request(job=Job(script="t.py", tpu_vm=place))).commands[0].words[-1])
        cd ~/gpt && fnaccel launch --no-config --carrier local --tpu t.py
    """
    place = request.job.tpu_vm
    if not place.name:
        raise LaunchError(
            "there is no name of a TPU VM", where="fnaccel launch --carrier tpu", fix="--tpu-name NAME"
        )
    if not place.zone:
        raise LaunchError(
            f"the TPU VM {place.name[0]!r} is in no zone",
            where="fnaccel launch --tpu-name",
            fix="--tpu-zone us-central2-b",
        )
    refuse(request.job, "tpu", "leave it out: gcloud starts all hosts of a pod")
    line = remote_line(request)
    commands = tuple(
        Command(
            words=(
                "gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone", place.zone,
                "--worker", place.workers, "--command", line,
            ),
            label=name if len(place.name) > 1 else "",
        )
        for name in place.name
    )  # fmt: skip
    which = "all workers" if place.workers == "all" else f"worker {place.workers}"
    summary = f"on {which} of {', '.join(place.name)}, through gcloud"
    return Plan(carrier="tpu", summary=summary, commands=commands, together=len(commands) > 1)


def remote_line(request: Request) -> str:
    """The shell line that each worker runs. Its parts run one after the other until one fails."""
    place = request.job.tpu_vm
    job = request.job if request.job.cpu else attrs.evolve(request.job, tpu=True)
    job = attrs.evolve(job, env={**{name: str(value) for name, value in place.env.items()}, **job.env})
    launch = shlex.join(["fnaccel", "launch", *options_of(job), *program_of(job)])
    parts = [] if place.folder is None else [f"cd {_folder(place.folder)}"]
    exports = [f"{name}={shlex.quote(str(value))}" for name, value in place.env.items()]
    parts += [f"export {' '.join(exports)}"] if exports else []
    if place.install is not None:
        parts.append(_as_root(shlex.join(["pip", "install", *shlex.split(place.install)]), place))
    parts += [*_lines_of_file(place), *place.commands]
    return " && ".join([*parts, _as_root(launch, place)])


def _as_root(command: str, place: TpuVmRecipe) -> str:
    # -E: root gets the variables too
    keeps = "sudo -E" if place.env else "sudo"
    return f"{keeps} {command}" if place.sudo else command


def _lines_of_file(place: TpuVmRecipe) -> list[str]:
    if place.command_file is None:
        return []
    path = Path(place.command_file)
    if not path.is_file():
        raise LaunchError(
            f"there is no file {path}", where="launch.tpu_vm.command_file", fix="check the path"
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _folder(folder: str) -> str:
    """The folder for a shell. Which folder `~` is, only the VM knows."""
    home, slash, subfolder = folder.partition("/")
    return f"~{slash}{shlex.quote(subfolder) if subfolder else ''}" if home == "~" else shlex.quote(folder)
