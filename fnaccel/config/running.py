"""The sections `run` and `launch` of a recipe: how long a run is, and the processes that it runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs

from fnaccel.errors import ConfigError, require_counts


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

    Raises:
        ConfigError: `gpus` are no GPUs, or a variable is no text.

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
