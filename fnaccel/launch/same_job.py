"""`JobIdentity`: what the launchers of one job have in common. If it differs, they belong to two jobs.

Options that may differ between machines are left out: `--node-rank`, `--master-addr`, `--env`, `--gpus`,
limits of time and more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import inspect
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from fnaccel.launch.job import Job
from fnaccel.launch.options import words_of


@attrs.frozen(kw_only=True)
class JobIdentity:
    """The identity of a job on one machine.

    Attributes:
        command: the options that all machines share, the program and its arguments, as they are typed.
        contents: a digest of the program's file, or an empty string if it has none.
        host: the name of this machine.
        folder: the working folder.

    Example:
        >>> from fnaccel.launch.same_job import JobIdentity
        >>> from fnaccel.launch.job import Job
        >>> JobIdentity.of(Job(script="train.py", args=("--lr", "1"), ranks=2, machines=4)).command
        'fnaccel launch -n 2 --nnodes 4 train.py --lr 1'
    """

    command: str
    contents: str
    host: str
    folder: str

    @staticmethod
    def of(job: Job) -> JobIdentity:
        """The identity of a job that is started here and now."""
        shared = Job(
            ranks=job.processes, machines=job.machines, min_machines=job.min_machines, restarts=job.restarts
        )
        fields = [f"{name}={json.dumps(value)}" for name, value in sorted(job.overrides.items())]
        words = [*words_of(shared, but=()), *(word for field in fields for word in ("--set", field))]
        return JobIdentity(
            command=" ".join(["fnaccel launch", shlex.join([*words, *_program(job)])]),
            contents=_digest(job),
            host=socket.gethostname(),
            folder=os.getcwd(),  # noqa: PTH109 - a text for a message
        )

    @property
    def text(self) -> str:
        """As JSON, for a store."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    def difference(self, other: JobIdentity) -> str:
        """What shows that the other launcher belongs to another job, or an empty string."""
        if self.command != other.command:
            return "the command"
        if self.contents != other.contents:
            return "the contents of the script"
        # machines may keep their code in different folders, but one machine keeps it in one folder
        return "the folder" if self.host == other.host and self.folder != other.folder else ""

    def __str__(self) -> str:
        return f"`{self.command}` in {self.folder} on {self.host}"


def _program(job: Job) -> list[str]:
    if job.function is not None:
        return [f"the function {getattr(inspect.unwrap(job.function), '__qualname__', '')}"]
    return [*(("-m", job.module) if job.module is not None else (str(job.script),)), *job.args]


def _digest(job: Job) -> str:
    if job.function is not None:
        data = _code(inspect.unwrap(job.function))
    else:
        path = _file(job)
        data = b""
        with contextlib.suppress(OSError):  # a rank that can't read it names it
            data = b"" if path is None else Path(path).read_bytes()
    return hashlib.sha256(data).hexdigest() if data else ""


def _code(function: Callable[..., Any]) -> bytes:
    code = getattr(function, "__code__", None)
    return b"" if code is None else code.co_code + repr(code.co_names).encode()


def _file(job: Job) -> str | None:
    """The file of the program. A module is found without an import of its packages into the launcher."""
    if job.module is None:
        return str(job.script) if job.python else shutil.which(str(job.script))
    folders: list[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109 - an entry of sys.path is text
    spec = None
    for name in [*job.module.split("."), "__main__"]:
        if folders is None:
            break
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        folders = (
            None
            if spec is None or spec.submodule_search_locations is None
            else [*spec.submodule_search_locations]
        )
    return spec.origin if spec is not None and spec.has_location else None
