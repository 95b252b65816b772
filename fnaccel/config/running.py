"""The sections `run` and `launch` of a recipe: how long a run is, and the processes that it runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs

from fnaccel.config.carriers import HostsRecipe, SageMakerRecipe, TpuVmRecipe
from fnaccel.errors import ConfigError, nearest, require_counts
from fnaccel.launch.sections import as_carrier, as_slurm
from fnaccel.world.paths import optional_path


@attrs.frozen(kw_only=True)
class RunRecipe:
    """The seed and the length of a run.

    Attributes:
        seed: for `train_step.init(seed=recipe.run.seed)`, and for the order of the data if
            `data.seed` is None.
        steps, epochs: the length of `fa.scan`, through `fa.config.scan_options`. None: the script's own.

    Raises:
        ArgumentError: `steps` or `epochs` is below 1.

    Example:
        >>> recipe = fa.config.Recipe(run=fa.config.RunRecipe(seed=3, steps=100))
        >>> fa.config.scan_options(recipe)["steps"], fa.config.shard_options(recipe)["seed"]
        (100, 3)
    """

    seed: int = 0
    steps: int | None = None
    epochs: int | None = None

    def __attrs_post_init__(self) -> None:
        require_counts("RunRecipe", steps=self.steps, epochs=self.epochs)


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


@attrs.frozen(kw_only=True)
class LaunchRecipe:
    """The processes that `fnaccel launch --config FILE` starts. Options of the command go over it.

    The launcher checks the values. A script that runs under another launcher ignores the section.

    Attributes:
        ranks: processes on this machine. None: its accelerators, or 1.
        machines: how many, at most.
        min_machines: how few may go on. None: `machines`.
        machine: the number of this machine, from 0. None: the machine that has `address` is number 0.
        address: a name or address of machine 0 that all machines reach.
        port: a free port there. None: 29500 on several machines, any port on one.
        restarts: how often the ranks are started again after a failure.
        min_ranks: how few ranks may go on if some were killed. None: all.
        cpu: compute on the CPU, whatever else there is.
        tpu: use XLA devices.
        gpus: the GPUs that the ranks use, such as `"0,1"`: CUDA_VISIBLE_DEVICES. None: all.
        affinity: keep each process on cores of its own.
        threads: of each process. None: the value of OMP_NUM_THREADS, or an even part of the cores.
        grace: seconds for ranks to save in, between SIGTERM and SIGKILL.
        watchdog: seconds for which ranks may wait for each other. 0: for ever.
        env: environment variables of the ranks. Variables that Python and PyTorch read when they are
            imported (PYTHONPATH, TORCH_LOGS) have no effect here: set them in the shell.
        carrier: `"local"`, `"elastic"` (several machines, the same command on each), `"mpirun"`, `"slurm"`,
            `"ssh"`, `"pdsh"`, `"tpu"`, `"sagemaker"`, `"ray"` or `"kubernetes"`. None: the carrier whose
            section is filled in, else `"elastic"` for several machines, else `"local"`.
        hosts: the machines of ssh, pdsh and mpirun.
        slurm: long options of sbatch (`partition`, `account`, `time`), and `setup`: shell lines before srun.
        tpu_vm, sagemaker: a record of options each.
        kubernetes: `image`, `namespace`, `name`, `resources`, `kind` and others: see docs/launching.md.
        ray: arguments of Ray's ScalingConfig and RunConfig, and `address`.
        role: a name for these ranks, in the variable ROLE_NAME and in messages of the launcher.
        rdzv: limits in seconds of the meeting of several machines: `join_timeout`, `last_call_timeout`,
            `keep_alive_interval`.
        monitor_interval: seconds between two looks of the watchdog at the ranks.
        numa: bind each rank to the cores and the memory of the NUMA node of its GPU.
        python: False: the script is a program of its own, and is not run by Python.
        tee: a folder. The output of each rank is shown, and written to `rank0.log`, `rank1.log`, ...
        quiet: print the first failure only as one line, and no notices.
        debug: turn on the checks of PyTorch's collectives, and C++ stacks.
        nccl: `"consumer"`: NCCL without peer-to-peer copies and without InfiniBand, for cards such as the
            RTX 40 series. `"default"`: never. None: `"consumer"` if such a card is found.

    Raises:
        ConfigError: `gpus` are no GPUs, a variable is no text, or there is no such carrier.

    Example:
        >>> launch = fa.config.LaunchRecipe(ranks=2, restarts=3, env={"NCCL_DEBUG": "WARN"})
        >>> print(fa.config.to_yaml(fa.config.Recipe(launch=launch)))
        launch:
          ranks: 2
          restarts: 3
          env:
            NCCL_DEBUG: WARN
    """

    ranks: int | None = None
    machines: int = 1
    min_machines: int | None = None
    machine: int | None = None
    address: str | None = None
    port: int | None = None
    restarts: int = 0
    min_ranks: int | None = None
    cpu: bool = False
    tpu: bool = False
    gpus: Any = attrs.field(default=None, converter=_as_cards)
    affinity: bool = False
    threads: int | None = None
    grace: float = 30.0
    watchdog: float = 120.0
    env: dict[str, Any] = attrs.field(factory=dict, converter=_as_variables)
    carrier: Any = attrs.field(default=None, converter=as_carrier)
    hosts: HostsRecipe = attrs.field(factory=HostsRecipe)
    slurm: dict[str, Any] = attrs.field(factory=dict, converter=as_slurm)
    tpu_vm: TpuVmRecipe = attrs.field(factory=TpuVmRecipe)
    sagemaker: SageMakerRecipe = attrs.field(factory=SageMakerRecipe)
    kubernetes: dict[str, Any] = attrs.field(factory=dict)
    ray: dict[str, Any] = attrs.field(factory=dict)
    role: str | None = None
    rdzv: dict[str, Any] = attrs.field(factory=dict)
    monitor_interval: float = 1.0
    numa: bool = False
    python: bool = True
    tee: str | None = None
    quiet: bool = False
    debug: bool = False
    nccl: str | None = None

    def __attrs_post_init__(self) -> None:
        optional_path(self.tee, "launch.tee")
        if self.nccl not in (None, "consumer", "default"):
            raise ConfigError(
                f"nccl={self.nccl!r} is no preset",
                where="launch.nccl",
                fix=nearest(str(self.nccl), ("consumer", "default")),
            )
