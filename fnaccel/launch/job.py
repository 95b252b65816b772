"""`Job`: the processes to start as a frozen value, and `check`: whether they can be started.

Nothing here starts a process, and nothing imports the user's code.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch import affinity
from fnaccel.launch.network import check_port
from fnaccel.launch.options import check_options
from fnaccel.launch.recipe import LaunchRecipe

STATIC_PORT = 29_500
"""The default port for several machines: all launchers must agree on it without communication."""
PER_CORE = 64
"""More processes than this for each core are a slip of the finger, and would stop the machine."""


@attrs.frozen(kw_only=True)
class Job(LaunchRecipe):
    """The processes of this machine, and the program of each process: the launch options, and these fields.

    Attributes:
        script: a Python file, or None if `module` is given.
        module: a module to run as `python -m` does.
        function: a function to call in place of a script, in each rank.
        args: the arguments of the script.
        overrides: dotted fields of the script's recipe, and their values.
        processes: how many on this machine, one for each local rank. By default `ranks`, or 1. The launcher
            counts accelerators if `ranks` is None, and goes on with fewer processes than `ranks` if some were
            killed.

    Example:
        >>> job = Job(script="train.py", args=("--lr", "0.1"), ranks=2, machines=4)
        >>> job.size
        8
    """

    script: str | None = None
    module: str | None = None
    function: Callable[[], None] | None = None
    args: tuple[str, ...] = ()
    overrides: dict[str, Any] = attrs.field(factory=dict)
    processes: int = attrs.field(
        default=attrs.Factory(lambda job: 1 if job.ranks is None else job.ranks, takes_self=True)
    )

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.processes * self.machines

    @property
    def least_machines(self) -> int:
        """The smallest number of machines to begin with."""
        return self.machines if self.min_machines is None else self.min_machines

    @property
    def store_address(self) -> str:
        """The name or address of the ranks' store, reachable from every machine."""
        return self.address or "127.0.0.1"

    @property
    def visible(self) -> dict[str, str]:
        """The variables that the user sets for the ranks: `env`, and the choice of GPUs."""
        return self.env | ({} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus})

    @property
    def name(self) -> str:
        """The program as the command line names it."""
        if self.function is not None:
            return "a function"
        return f"-m {self.module}" if self.module is not None else str(self.script)

    def rank(self, local_rank: int) -> int:
        """The rank of one process of this machine."""
        return (self.machine or 0) * self.processes + local_rank


def check(job: Job) -> None:
    """See that everything a job asks for is there.

    Raises:
        LaunchError: the job can't be started. Nothing was started.
    """
    check_values(job)
    if job.affinity:
        affinity.cores_of(0, job.processes)
    _check_program(job)
    if job.port is not None and (job.machine == 0 or not job.several):
        check_port(job.port)


def check_values(job: Job) -> None:
    """See that the values of a job make sense. The program and the port are not looked at.

    Raises:
        LaunchError: a value is outside its range, or contradicts another.
    """
    _require(job.processes >= 1, f"{job.processes} processes were asked for", "-n 1, or more")
    cores = os.cpu_count() or 1
    _require(
        job.processes <= PER_CORE * cores,
        f"{job.processes} processes were asked for, and this machine has {cores} cores",
        f"at most {PER_CORE} for a core: -n {PER_CORE * cores}, or more machines",
    )
    check_options(job)
    _check_restarts(job)
    _check_devices(job)
    _require(
        not job.rdzv or job.several, "--rdzv-conf, and one machine", "--nnodes N, or leave --rdzv-conf out"
    )
    _require(not (job.numa and job.affinity), "--numa and --cpu-affinity together", "one of the two")
    _require(job.python or job.module is None, "--no-python and -m together", "one of the two")
    _require(
        1 <= job.least_machines <= job.machines,
        f"{job.least_machines}:{job.machines} machines were asked for",
        "--nnodes MIN:MAX, with 1 <= MIN <= MAX",
    )
    _require(
        0 <= (job.machine or 0) < job.machines,
        f"there is no machine {job.machine} among {job.machines}",
        f"--node-rank from 0 to {job.machines - 1}",
    )


def _check_restarts(job: Job) -> None:
    if job.min_ranks is None:
        return
    _require(
        not job.several,
        "--min-ranks is for one machine",
        "--nnodes MIN:MAX lets several machines go on with fewer",
    )
    _require(job.restarts > 0, "--min-ranks, and no restarts", "--max-restarts 3")
    _require(
        1 <= job.min_ranks <= job.processes,
        f"{job.processes} ranks can't go on as {job.min_ranks}",
        f"--min-ranks from 1 to {job.processes}",
    )


def _check_devices(job: Job) -> None:
    _require(not (job.tpu and job.cpu), "--tpu and --cpu together", "one of the two")
    _require(
        not job.tpu or job.size == 1,
        f"{job.size} processes for XLA devices, which one drives all",
        "-n 1, and fa.xla(shard=True) to spread a model over them",
    )
    _require(
        job.gpus is None or not (job.cpu or job.tpu),
        f"--gpus {job.gpus}, and --{'cpu' if job.cpu else 'tpu'}",
        "one of the two",
    )


def _check_program(job: Job) -> None:
    if job.function is not None:
        return
    if job.module is not None:
        # only the outermost package: finding its modules would import it into the launcher
        top = job.module.partition(".")[0]
        spec = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
            top,
            [os.getcwd(), *sys.path],  # noqa: PTH109 - an entry of sys.path is text
        )
        # an editable install has a finder of its own
        spec = spec or any(finder.find_spec(top, None) for finder in sys.meta_path)
        _require(bool(spec), f"there is no module {job.module!r}", "check its name, and start in its folder")
        return
    _require(bool(job.script), "there is nothing to run", "fnaccel launch train.py, or -m package.module")
    if not job.python:
        found = shutil.which(str(job.script))
        _require(
            found is not None,
            f"there is no program {job.script}",
            "give a path, and make it executable: chmod +x",
        )
        return
    path = Path(str(job.script))
    _require(not path.is_dir(), f"{job.script} is a folder", f"name the file: {path / '__main__.py'}")
    _require(path.is_file(), f"there is no file {job.script}", f"check the path. This folder is {Path.cwd()}")


def _require(condition: bool, what: str, fix: str) -> None:
    if not condition:
        raise LaunchError(what, where="fnaccel launch", fix=fix)
