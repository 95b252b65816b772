"""`Request`, the argument of a carrier, and `Plan`, its result. Both are data. Nothing is started here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from fnaccel.launch.job import Job


@attrs.frozen(kw_only=True)
class Request:
    """A job, and facts about this machine that a carrier may read.

    Attributes:
        job: with the sections of all carriers. `job.ranks` is None if each machine counts its accelerators.
        python: the interpreter, which hosts of a cluster have at the same path.
        folder: the working folder, which hosts of a cluster have at the same path.
        environ: the environment of the caller.
        port: a free port of this machine.
        presets: variables of `--debug` and NCCL on this machine.
        mpi: the output of `mpirun --version` on this machine.
    """

    job: Job
    python: str = "python"
    folder: str = "."
    environ: Mapping[str, str] = attrs.field(factory=dict)
    port: int = 29_500
    presets: Mapping[str, str] = attrs.field(factory=dict)
    mpi: str = ""


@attrs.frozen(kw_only=True)
class Command:
    """A command of this machine.

    Attributes:
        words: the program and its arguments.
        env: variables over those of this process.
        label: begins each line of its output, if several commands run at once.

    Example:
        >>> print(Command(words=("python", "my train.py"), env={"RANK": "0"}).text)
        RANK=0 python 'my train.py'
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(factory=dict)
    label: str = ""

    @property
    def text(self) -> str:
        """The command as a shell reads it."""
        pairs = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*pairs, shlex.join(self.words)])


@attrs.frozen(kw_only=True)
class Plan:
    """The files and commands of a carrier.

    Attributes:
        carrier: its name.
        summary: a sentence for `--dry-run`.
        files: the path and the text of files that are written first.
        commands: they run at the same time if `together`, else one after the other until one fails.
        together: whether the commands run at the same time.
        all_or_none: whether the failure of one command ends the others.
        request: the arguments for an SDK, or None.
    """

    carrier: str
    summary: str
    files: Mapping[str, str] = attrs.field(factory=dict)
    commands: tuple[Command, ...] = ()
    together: bool = False
    all_or_none: bool = True
    request: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The output of `--dry-run`. Lines that are no command begin with `#`."""
        lines = [f"# {self.carrier}: {self.summary}"]
        if self.request is not None:
            lines.append(json.dumps(self.request, indent=2))
        for path, text in self.files.items():
            lines += ["", f"# the file {path}:", text.rstrip()]
        if self.files and self.commands:
            lines += ["", "# the command:"]
        # ssh ends with its input, which a command in the background does not have
        at_once = self.carrier == "local" and len(self.commands) > 1
        for command in self.commands:
            label = [f"# {command.label}:"] if command.label else []
            lines += [*label, f"{command.text} &" if at_once else command.text]
        lines += ["wait"] if at_once else []
        return "\n".join(lines)


class Carrier(Protocol):
    """A pure function from a request to a plan.

    Raises:
        LaunchError: the job has options that this carrier can't carry, or a section lacks a value.
    """

    def __call__(self, request: Request) -> Plan: ...  # noqa: D102 - the class says it
