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

from fnaccel.errors import LaunchError, nearest
from fnaccel.launch import affinity
from fnaccel.launch.network import check_port

STATIC_PORT = 29_500
"""The default port for several machines: all launchers must agree on it without communication."""
OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that differ from rank to rank, or that the launcher chooses."""
RDZV_KEYS = ("join_timeout", "last_call_timeout", "keep_alive_interval")
"""Limits of the meeting of several machines, in seconds. PyTorch's agent has the same names."""
PER_CORE = 64
"""More processes than this for each core are a slip of the finger, and would stop the machine."""


@attrs.frozen(kw_only=True)
class Job:
    """The processes of this machine, and the program of each process.

    Attributes:
        script: a Python file, or None if `module` is given.
        module: a module to run as `python -m` does.
        function: a function to call in place of a script, in each rank.
        args: the arguments of the script.
        processes: how many on this machine, one for each local rank.
        machines: the largest number of machines.
        min_machines: the smallest number of machines. None: `machines`.
        machine: the number of this machine. None: any.
        address: the name or address of the ranks' store, reachable from every machine.
        port: the port of the store. None: a free port (one machine), or 29500 (several).
        cpu: keep `fa.start` from taking an accelerator.
        tpu: let `fa.start` take the XLA devices, all for one process.
        affinity: keep each process on cores of its own.
        threads: of each process. None: the value of OMP_NUM_THREADS, or an even part of the cores.
        grace: seconds between SIGTERM and SIGKILL when the launcher is told to end, for ranks that are
            saving. After a failure there is nothing to save, and it is 10 at most.
        restarts: how often the ranks are started again after a failure.
        watchdog: seconds for which ranks may wait for each other in one phase of a step. 0: for ever.
        min_ranks: how few ranks may go on if some were killed. None: as many as there were.
        gpus: the GPUs that the ranks use, as in CUDA_VISIBLE_DEVICES. None: all.
        env: variables of the ranks, over those of the launcher.
        overrides: dotted fields of the script's recipe, and their values.
        role: a name for these ranks, in ROLE_NAME and in the launcher's messages.
        rdzv: limits of the meeting of several machines: `RDZV_KEYS`.
        interval: seconds between two looks of the watchdog.
        numa: keep each process on the cores of the NUMA node of its GPU.
        python: whether the script is run by Python. If not, it is a program of its own.
        tee: a folder for the output of each rank, or None.
        quiet: whether the launcher prints failures only.
        debug: whether the checks of PyTorch's collectives are on.
        nccl: `"consumer"` for NCCL without peer-to-peer and InfiniBand, `"default"`, or None: by the cards.

    Example:
        >>> job = Job(script="train.py", args=("--lr", "0.1"), processes=2, machines=4)
        >>> job.size
        8
    """

    script: str | None = None
    module: str | None = None
    function: Callable[[], None] | None = None
    args: tuple[str, ...] = ()
    processes: int = 1
    machines: int = 1
    min_machines: int | None = None
    machine: int | None = 0
    address: str = "127.0.0.1"
    port: int | None = None
    cpu: bool = False
    tpu: bool = False
    affinity: bool = False
    threads: int | None = None
    grace: float = 30.0  # as SLURM
    restarts: int = 0
    watchdog: float = 120.0
    min_ranks: int | None = None
    gpus: str | None = None
    env: dict[str, str] = attrs.field(factory=dict)
    overrides: dict[str, Any] = attrs.field(factory=dict)
    role: str | None = None
    rdzv: dict[str, float] = attrs.field(factory=dict)
    interval: float = 1.0
    numa: bool = False
    python: bool = True
    tee: str | None = None
    quiet: bool = False
    debug: bool = False
    nccl: str | None = None

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.processes * self.machines

    @property
    def several(self) -> bool:
        """Whether launchers of several machines have to agree, even if only one of them is there yet."""
        return self.machines > 1

    @property
    def least_machines(self) -> int:
        """The smallest number of machines to begin with."""
        return self.machines if self.min_machines is None else self.min_machines

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
    if job.port is not None and job.machine == 0:
        check_port(job.port)


def check_values(job: Job) -> None:
    """See that the values of a job make sense together. The program and the port are not looked at.

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
    _require(
        job.threads is None or job.threads >= 1,
        f"a process can't compute with {job.threads} threads",
        "--threads 1, or more",
    )
    _require(job.grace >= 0, f"a grace of {job.grace:g} seconds is in the past", "--timeout-grace 30")
    _require(job.watchdog >= 0, f"a watchdog can't wait {job.watchdog:g} seconds", "--watchdog 120, or 0")
    _check_restarts(job)
    _check_devices(job)
    _check_options(job)
    _require(job.machines >= 1, f"{job.machines} machines were asked for", "--nnodes 1, or more")
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
    _require(
        job.port is None or 0 < job.port < 65_536,
        f"{job.port} is no port",
        "--master-port from 1 to 65535",
    )
    reserved = [name for name in OF_A_RANK if name in job.env]
    _require(
        not reserved,
        f"{', '.join(reserved)} can't be set by --env or launch.env: the launcher sets it",
        "leave it out. --master-addr and --master-port set the address",
    )
    for name, value in job.env.items():
        _require(
            isinstance(name, str) and bool(name) and not {"=", "\0"} & set(name),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"{name!r} can't be the name of an environment variable",
            "a name without '='",
        )
        _require(
            isinstance(value, str) and "\0" not in value,  # pyright: ignore[reportUnnecessaryIsInstance]
            f"the environment variable {name} can't be {value!r}",
            "a text without the character 0",
        )


def _check_restarts(job: Job) -> None:
    _require(job.restarts >= 0, f"{job.restarts} restarts were asked for", "--max-restarts 0, or more")
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


def _check_options(job: Job) -> None:
    _require(job.interval > 0, f"a look each {job.interval:g} seconds", "--monitor-interval 1")
    for name, seconds in job.rdzv.items():
        _require(name in RDZV_KEYS, f"--rdzv-conf has no key {name!r}", nearest(name, RDZV_KEYS))
        good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
        _require(good, f"--rdzv-conf {name}={seconds}", f"seconds above 0: {name}=30")
    _require(
        not job.rdzv or job.several, "--rdzv-conf, and one machine", "--nnodes N, or leave --rdzv-conf out"
    )
    _require(not (job.numa and job.affinity), "--numa and --cpu-affinity together", "one of the two")
    _require(job.python or job.module is None, "--no-python and -m together", "one of the two")


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
