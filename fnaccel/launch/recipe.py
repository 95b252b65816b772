"""`LaunchRecipe`: all launch options as one record, with their flags, help texts, checks and refusals.

It is the section `launch` of a recipe, and `Job` adds the program to it. `launch/options.py` has what follows
from its fields: the parser, the command line for another machine, and the checks before a start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from fnaccel.errors import ConfigError, LaunchError, nearest
from fnaccel.launch.options import at_least, option, read_pair, rule
from fnaccel.launch.sections import CARRIERS, HostsRecipe, SageMakerRecipe, TpuVmRecipe, as_slurm, one_line
from fnaccel.world.paths import optional_path
from fnaccel.world.settings import parse_value

OF_A_RANK = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that differ from rank to rank, or that the launcher chooses."""
RDZV_KEYS = ("join_timeout", "last_call_timeout", "keep_alive_interval")
"""Limits of the meeting of several machines, in seconds. PyTorch's agent has the same names."""
_STARTERS = "mpirun srun sagemaker"
"""Carriers that start the ranks themselves, without fnaccel's launcher. `srun` is SLURM with `srun: rank`.
`mpich` below is the mpirun of MPICH and of Intel MPI."""
_MORE = "more about the processes"


def _as_cards(cards: object) -> str | None:
    """The text of CUDA_VISIBLE_DEVICES: YAML and `--set` also read `0` as a number and `0,1` as a list."""
    if cards is None or isinstance(cards, str):
        return cards
    numbers = list(cast(Iterable[Any], cards)) if isinstance(cards, list | tuple) else [cards]
    if not numbers or any(isinstance(card, bool) or not isinstance(card, int | str) for card in numbers):
        raise ConfigError(
            f"gpus={cards!r} names no GPUs",
            where="launch.gpus",
            fix="write numbers: gpus: 0,1 or gpus: [0, 1]",
        )
    return ",".join(map(str, numbers))


def _as_variables(variables: object) -> dict[str, str]:
    if not isinstance(variables, Mapping):
        raise ConfigError(
            f"env={variables!r} holds no variables", where="launch.env", fix="write env: {NCCL_DEBUG: INFO}"
        )
    pairs = cast(Mapping[Any, Any], variables)
    for name, value in pairs.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(
                f"the variable {name} is {value!r}, and a variable is text",
                where=f"launch.env.{name}",
                fix=f'write it in quotes: {name}: "1"',
            )
    return {str(name): str(value) for name, value in pairs.items()}


def _one_of(field: str, names: tuple[str, ...], problem: str) -> Callable[[Any], str | None]:
    """A converter that lets one of some names pass, and None."""

    def convert(name: Any) -> str | None:
        if name is not None and name not in names:
            raise ConfigError(problem.format(name), where=field, fix=nearest(str(name), names))
        return name

    return convert


def _as_folder(path: Any) -> str | None:
    optional_path(path, "launch.tee")
    return path


def _check_variables(variables: Mapping[str, str]) -> tuple[str, str] | None:
    reserved = [name for name in OF_A_RANK if name in variables]
    if reserved:
        return (
            f"{', '.join(reserved)} can't be set by --env or launch.env: the launcher sets it",
            "leave it out. --master-addr and --master-port set the address",
        )
    for name, value in variables.items():
        if not name or {"=", "\0"} & set(name):
            return f"{name!r} can't be the name of an environment variable", "a name without '='"
        if "\0" in value:
            return f"the environment variable {name} can't be {value!r}", "a text without the character 0"
    return None


def _check_limits(limits: Mapping[str, Any]) -> tuple[str, str] | None:
    for name, seconds in limits.items():
        if name not in RDZV_KEYS:
            return f"--rdzv-conf has no key {name!r}", nearest(name, RDZV_KEYS)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
            return f"--rdzv-conf {name}={seconds}", f"seconds above 0: {name}=30"
    return None


def _read_variables(texts: list[str]) -> dict[str, Any]:
    pairs = (read_pair(text, "--env", "--env NCCL_DEBUG=INFO") for text in texts)
    return {f"env.{name}": value for name, value in pairs}


def _read_limits(text: str) -> dict[str, Any]:
    pairs = [read_pair(pair, "--rdzv-conf", "--rdzv-conf join_timeout=60") for pair in text.split(",")]
    return {"rdzv": {name.strip(): parse_value(value) for name, value in pairs}}


def _read_machines(text: str) -> dict[str, Any]:
    """The fewest and the most machines that --nnodes asks for."""
    fewest, colon, most = text.partition(":")
    if not fewest.isdecimal() or (colon and not most.isdecimal()):
        raise LaunchError(
            f"{text!r} is no number of machines",
            where="fnaccel launch --nnodes",
            fix="--nnodes 2, or --nnodes 2:4 for 2 to 4 machines",
        )
    least, largest = int(fewest), int(most or fewest)
    return {"machines": largest, "min_machines": None if least == largest else least}


def _write_machines(launch: LaunchRecipe) -> list[str]:
    least, most = launch.min_machines, launch.machines
    return [str(most) if least in (None, most) else f"{least}:{most}"]


@attrs.frozen(kw_only=True)
class LaunchRecipe:
    """The processes that `fnaccel launch --config FILE` starts. Options of the command go over it.

    The launcher checks the values. A script that runs under another launcher ignores the section.

    Attributes:
        ranks: processes on this machine. None: its accelerators, or 1.
        machines: how many, at most.
        min_machines: how few may begin or go on. None: `machines`.
        machine: the number of this machine, from 0. None: any.
        address: a name or address of machine 0 that all machines reach.
        port: a free port there. None: 29500 on several machines, any port on one.
        cpu: compute on the CPU, whatever else there is.
        affinity: keep each process on cores of its own.
        threads: of each process. None: the value of OMP_NUM_THREADS, or an even part of the cores.
        grace: seconds for ranks to save in, between SIGTERM and SIGKILL. After a failure there is nothing to
            save, and it is 10 at most.
        restarts: how often the ranks are started again after a failure.
        min_ranks: how few ranks may go on if some were killed. None: all.
        watchdog: seconds for which ranks may wait for each other. 0: for ever.
        gpus: the GPUs that the ranks use, such as `"0,1"`: CUDA_VISIBLE_DEVICES. None: all.
        env: environment variables of the ranks. Variables that Python and PyTorch read when they are
            imported (PYTHONPATH, TORCH_LOGS) have no effect here: set them in the shell.
        tpu: use XLA devices.
        carrier: `"local"`, `"elastic"` (several machines, the same command on each), `"mpirun"`, `"slurm"`,
            `"ssh"`, `"pdsh"`, `"tpu"` or `"sagemaker"`. None: the carrier whose
            section is filled in, else `"elastic"` for several machines, else `"local"`.
        hosts: the machines of ssh, pdsh and mpirun.
        slurm: long options of sbatch (`partition`, `account`, `time`), and `setup`: shell lines before srun.
        tpu_vm, sagemaker: a record of options each.
        python: False: the script is a program of its own, and is not run by Python.
        numa: bind each rank to the cores and the memory of the NUMA node of its GPU.
        nccl: `"consumer"`: NCCL without peer-to-peer copies and without InfiniBand, for cards such as the
            RTX 40 series. `"default"`: never. None: `"consumer"` if such a card is found.
        role: a name for these ranks, in the variable ROLE_NAME and in messages of the launcher.
        rdzv: limits in seconds of the meeting of several machines: `join_timeout`, `last_call_timeout`,
            `keep_alive_interval`.
        monitor_interval: seconds between two looks of the watchdog at the ranks.
        tee: a folder. The output of each rank is shown, and written to `rank0.log`, `rank1.log`, ...
        quiet: print the first failure only as one line, and no notices.
        debug: turn on the checks of PyTorch's collectives, and C++ stacks.

    Raises:
        ConfigError: `gpus` are no GPUs, a variable is no text, there is no such carrier, or a text that is no
            shell line has a control character, such as a newline.

    Example:
        >>> launch = fa.config.LaunchRecipe(ranks=2, restarts=3, env={"NCCL_DEBUG": "WARN"})
        >>> print(fa.config.to_yaml(fa.config.Recipe(launch=launch)))
        launch:
          ranks: 2
          restarts: 3
          env:
            NCCL_DEBUG: WARN
    """

    # fmt: off
    ranks: int | None = option("-n --nproc", "processes on this machine (default: its accelerators, or 1)")
    machines: int = option(
        "--nnodes",
        "the number of machines. MIN:MAX: go on with the remaining machines, and let more join",
        default=1, metavar="N | MIN:MAX", group="several machines", refused_by="tpu",
        check=at_least(1, "{} machines were asked for", "--nnodes 1, or more"),
        read=_read_machines, write=_write_machines)
    min_machines: int | None = option("--nnodes MIN:MAX", refused_by=_STARTERS)
    machine: int | None = option(
        "--node-rank",
        "number of this machine, from 0, which keeps the store (default: the machine that has --master-addr "
        "is number 0, the others in any order)", group="several machines")
    address: str | None = option(
        "--master-addr", "a name or address of machine 0 that all reach", group="several machines")
    port: int | None = option(
        "--master-port", "a free port there (default: 29500)", group="several machines",
        check=rule(lambda port: 0 < port < 65_536, "{} is no port", "--master-port from 1 to 65535"))
    cpu: bool = option("--cpu", "compute on the CPU, whatever else there is", default=False)
    affinity: bool = option(
        "--cpu-affinity", "keep each process, and its threads, on cores of its own, in one NUMA node (Linux)",
        default=False, refused_by="srun")
    threads: int | None = option(
        "--threads", "of each process (default: OMP_NUM_THREADS, or a part)",
        check=at_least(1, "a process can't compute with {} threads", "--threads 1, or more"))
    grace: float = option(  # 30 as SLURM
        "--timeout-grace", "for ranks to save in, between SIGTERM and SIGKILL (default: 30)",
        default=30.0, metavar="SECONDS",
        check=at_least(0, "a grace of {:g} seconds is in the past", "--timeout-grace 30"))
    restarts: int = option(
        "--max-restarts", "start the ranks again after a failure, N times in all (default: 0)",
        default=0, metavar="N", refused_by="mpirun srun sagemaker",
        check=at_least(0, "{} restarts were asked for", "--max-restarts 0, or more"))
    min_ranks: int | None = option(
        "--min-ranks", "go on with as few as M ranks if some were killed (default: all)",
        metavar="M", refused_by=_STARTERS)
    watchdog: float = option(
        "--watchdog", "end ranks that wait in one phase of a step for so long, in data for 5 times as long, "
        "and show why (default: 120, 0: never)",
        default=120.0, metavar="SECONDS",
        check=at_least(0, "a watchdog can't wait {:g} seconds", "--watchdog 120, or 0"))
    gpus: Any = option(
        "--gpus", "such as 0,1 (default: all)", metavar="NUMBERS", converter=_as_cards)
    env: dict[str, Any] = option(
        "--env", "a variable of the ranks. May be repeated", metavar="NAME=VALUE", repeated=True,
        default=dict, converter=_as_variables, check=_check_variables, read=_read_variables,
        write=lambda launch: [f"{name}={value}" for name, value in launch.env.items()])
    tpu: bool = option("--tpu", "use XLA devices (default if PJRT_DEVICE=TPU)", default=False, group="TPU")
    tpu_vm: TpuVmRecipe = attrs.field(factory=TpuVmRecipe)
    carrier: Any = option(
        "--carrier", ", ".join(CARRIERS), metavar="NAME", group="carriers",
        converter=_one_of("launch.carrier", CARRIERS, "no carrier is called {!r}"))
    hosts: HostsRecipe = attrs.field(factory=HostsRecipe)
    slurm: dict[str, Any] = attrs.field(factory=dict, converter=as_slurm)
    sagemaker: SageMakerRecipe = attrs.field(factory=SageMakerRecipe)
    python: bool = option(
        "--no-python", "the script is a program of its own, and is not run by Python",
        default=True, group=_MORE)
    numa: bool = option(
        "--numa", "keep each process on the cores of the NUMA node of its GPU (Linux)",
        default=False, group=_MORE, refused_by="srun")
    nccl: str | None = option(
        "--nccl",
        "consumer: no peer-to-peer copies, no InfiniBand (default if RTX 40 cards need it), or default",
        converter=_one_of("launch.nccl", ("consumer", "default"), "nccl={!r} is no preset"),
        metavar="PRESET", group=_MORE)
    role: str | None = option(
        "--role", "of these ranks, in the variable ROLE_NAME", metavar="NAME", group=_MORE)
    rdzv: dict[str, Any] = option(
        "--rdzv-conf", "limits of the meeting in seconds: join_timeout=60,...",
        default=dict, metavar="PAIRS", group=_MORE, refused_by=_STARTERS, check=_check_limits,
        read=_read_limits,
        write=lambda launch: [",".join(f"{name}={value}" for name, value in launch.rdzv.items())])
    monitor_interval: float = option(
        "--monitor-interval",
        "between two looks of the watchdog (default: 1). The end of a process is seen at once",
        default=1.0, metavar="SECONDS", group=_MORE, refused_by="mpirun srun sagemaker",
        check=rule(lambda seconds: seconds > 0, "a look each {:g} seconds", "--monitor-interval 1"))
    tee: str | None = option(
        "--tee", "write the output of each rank to rank0.log, ... and show it",
        converter=_as_folder, metavar="FOLDER", group=_MORE, refused_by="mpich srun sagemaker")
    quiet: bool = option("-q --quiet", "print failures only", default=False, group=_MORE)
    debug: bool = option("--debug", "check collectives, and show C++ stacks", default=False, group=_MORE)
    # fmt: on

    def __attrs_post_init__(self) -> None:
        names = [field.name for field in attrs.fields(LaunchRecipe)]  # not a job's arguments
        one_line({name: value for name, value in attrs.asdict(self).items() if name in names}, "launch")

    @property
    def several(self) -> bool:
        """Whether launchers of several machines have to agree, even if only one of them is there yet."""
        return self.machines > 1
