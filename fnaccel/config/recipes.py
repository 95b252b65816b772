"""`Recipe`: a run's choices as one frozen value, the same in Python, in YAML and on the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

import attrs

from fnaccel.errors import ConfigError, as_names, nearest, require, require_counts
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.step.choices import Action, Kept, PrecisionName, Remainder, Scope
from fnaccel.world.paths import optional_path


def _check_finite(_: object, __: object, rate: float) -> None:
    require(math.isfinite(rate), f"the rate of an optimizer is {rate}", "optimizer.lr", "a number: 3e-4")


@attrs.frozen(kw_only=True)
class OptimizerRecipe:
    """Which optimizer, its rate and its options.

    Attributes:
        name: `"sgd"`, `"adam"`, `"adamw"`, `"adafactor"`, or `"module:Class"` of a torch optimizer.
        lr: the rate, or a schedule's peak.
        schedule: `"constant"`, or `"warmup_cosine"`, `"warmup_linear"`, `"cosine"`, ..., or a
            reference `"module:function"` to a schedule of yours.
        schedule_options: further arguments of the schedule, such as `warmup` and `total`: in updates,
            in epochs (`"3 epochs"`), or a share of `total` (`"10%"`).
        options: further arguments of the optimizer, such as `weight_decay`.
        groups: pattern -> options.
        by_pattern: pattern -> another optimizer for the parameters that match. The first that matches
            holds. The optimizer itself takes the other parameters.
        by_model: model -> its optimizer, if there are several models. The optimizer itself takes the others.
        starts: updates before its first, as `fa.optim.starting_at`.

    Example:
        >>> optimizer = fa.config.OptimizerRecipe(
        ...     lr=3e-4, schedule="warmup_cosine", schedule_options={"warmup": 100, "total": 1_000}
        ... )
        >>> recipe = fa.config.Recipe(optimizer=optimizer)
    """

    name: str = "adamw"
    lr: float = attrs.field(default=1e-3, validator=_check_finite)
    schedule: Any = "constant"
    schedule_options: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, Any] = attrs.field(factory=dict)
    groups: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    by_pattern: dict[str, OptimizerRecipe] = attrs.field(factory=dict)
    by_model: dict[str, OptimizerRecipe] = attrs.field(factory=dict)
    starts: int = 0


@attrs.frozen(kw_only=True)
class DataRecipe:
    """How loaders are shared: the arguments of `fa.shard`.

    Attributes:
        window: batches that make one update, or a reference `"module:function"` to a function of the step.
        seed: of the order. None: `run.seed`.

    Example:
        >>> recipe = fa.config.Recipe(data=fa.config.DataRecipe(remainder="drop"))
        >>> shards = fa.shard(loader, **fa.config.shard_options(recipe))
    """

    window: int | str | None = None
    across_epochs: bool = False
    remainder: Remainder | None = None
    seed: int | None = None
    per_rank: bool = False
    dispatch: bool = False
    prefetch: int = 1
    device_placement: bool = True
    copies: bool = True
    rows_per_sample: int = 1
    accept_changes: bool = False


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


@attrs.frozen(kw_only=True)
class CheckpointRecipe:
    """The directory, the interval and the number of checkpoints. Nothing is saved without a directory.

    Attributes:
        directory: the root of the checkpoints.
        every: steps between two saves. None: at the end only.
        keep: how many of the newest stay. None: all.
        keep_every: steps that are multiples of this always stay.
        each_machine: whether machines do not share the directory.
        background: whether training goes on while a state is written.

    Example:
        >>> checkpoint = fa.config.CheckpointRecipe(directory="runs/gpt", every=100, keep=3)
        >>> recipe = fa.config.Recipe(checkpoint=checkpoint)
        >>> fa.config.scan_options(recipe)["save"].every
        100
    """

    directory: str | None = None
    every: int | None = None
    keep: int | None = None
    keep_every: int | None = None
    each_machine: bool = False
    background: bool = False

    def __attrs_post_init__(self) -> None:
        optional_path(self.directory, "checkpoint.directory")
        require_counts("CheckpointRecipe", every=self.every, keep=self.keep, keep_every=self.keep_every)


def _as_entries(trackers: object) -> tuple[Any, ...]:
    return (trackers,) if isinstance(trackers, str | Mapping) else tuple(cast(Iterable[Any], trackers))


@attrs.frozen(kw_only=True)
class TrackingRecipe:
    """The trackers, how often they are written, what is measured, and the level of log lines.

    Attributes:
        trackers: names such as `"jsonl"`, `"tensorboard"` or `"all"`, references `"module:Class"` to trackers
            of yours, or mappings of `name` and the options of that tracker.
        log_every: write each so many steps.
        report, throughput, memory, profile: as for `fa.Tracking` and `fa.Watch`. `profile` is a directory.
        level: the level of `fa.seeing.get_logger`: `"debug"`, `"info"`, `"warning"`, `"error"`. None leaves
            it alone.

    Example:
        >>> tracking = fa.config.TrackingRecipe(
        ...     trackers=["jsonl", {"name": "wandb", "project": "gpt"}], log_every=10
        ... )
        >>> recipe = fa.config.Recipe(tracking=tracking)
        >>> fa.config.scan_options(recipe)["track"].every
        10
    """

    trackers: Any = attrs.field(default=(), converter=_as_entries)
    log_every: int = 1
    report: str | None = None
    throughput: bool = False
    memory: bool = False
    profile: str | None = None
    level: str | None = None

    def __attrs_post_init__(self) -> None:
        require(
            self.log_every >= 1, f"log_every={self.log_every}", "TrackingRecipe", "log_every is 1 or more"
        )
        optional_path(self.report, "tracking.report")
        optional_path(self.profile, "tracking.profile")
        for entry in self.trackers:
            if not isinstance(entry, str) and not (isinstance(entry, Mapping) and "name" in entry):
                raise ConfigError(
                    f"{entry!r} names no tracker",
                    where="tracking.trackers",
                    fix="write a name, or a mapping such as {name: wandb, project: gpt}",
                )
        levels = ("debug", "info", "warning", "error", "critical")
        if self.level is not None and self.level.lower() not in levels:
            raise ConfigError(
                f"level={self.level!r} is no level", where="tracking.level", fix=nearest(self.level, levels)
            )


@attrs.frozen(kw_only=True)
class Recipe:
    """Everything about a run but its model, its loss and its data.

    Attributes:
        strategy: a name or text, such as `"fsdp"` or `"ddp(2) * fsdp(4)"`.
        precision: `"fp32"`, `"bf16"`, `"fp16"` or `"fp8"`.
        accumulate: micro-batches in a batch.
        clip_norm, clip_value: bounds of the gradient, or None.
        skip_nonfinite: whether updates with NaN or infinite gradients are skipped.
        on_spike: `"warn"`, `"skip"` or `"stop"` if a loss is far above the usual one, as in
            `fa.transforms.on_spike`.
        ema: decay of the average of parameters, or None.
        remat: whether blocks are recomputed in backward, or what is kept: `"attention"`, `"matmuls"`.
        compile: `"auto"`, `"block"`, `"loss"`, `"step"`, or None.
        compile_options: further arguments of `fa.compile`, such as `backend` and `mode`.
        attention: names of kernels for `fa.transforms.attention`. Empty: torch chooses.
        fp8: arguments of `fa.transforms.Float8`, if the precision is `"fp8"`.
        transforms: references `"module:name"` to transforms of yours (`Step -> Step`), applied last.
        optimizer, data, run, checkpoint, tracking, launch: the sections, each a record of its own.

    Example:
        >>> fa.config.Recipe(strategy="fsdp", precision="bf16", clip_norm=1.0).strategy
        'fsdp'
    """

    strategy: str = attrs.field(default="local", converter=str)
    precision: PrecisionName = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    skip_nonfinite: bool = False
    on_spike: Action | None = None
    ema: float | None = None
    remat: bool | Kept = False
    compile: Scope | None = None
    compile_options: dict[str, Any] = attrs.field(factory=dict)
    attention: Any = attrs.field(default=(), converter=as_names)
    fp8: dict[str, Any] = attrs.field(factory=dict)
    transforms: tuple[Any, ...] = attrs.field(default=(), converter=tuple)
    optimizer: OptimizerRecipe = attrs.field(factory=OptimizerRecipe)
    data: DataRecipe = attrs.field(factory=DataRecipe)
    run: RunRecipe = attrs.field(factory=RunRecipe)
    checkpoint: CheckpointRecipe = attrs.field(factory=CheckpointRecipe)
    tracking: TrackingRecipe = attrs.field(factory=TrackingRecipe)
    launch: LaunchRecipe = attrs.field(factory=LaunchRecipe)

    def __attrs_post_init__(self) -> None:
        kept = get_args(Kept)
        if self.remat not in (True, False, *kept):
            raise ConfigError(
                f"remat={self.remat!r} names nothing that is kept",
                where="Recipe",
                fix=f"true, false, or one of: {', '.join(kept)}",
            )
        require(self.accumulate >= 1, f"accumulate={self.accumulate}", "Recipe", "accumulate is 1 or more")
        if self.compile not in (None, *get_args(Scope)):
            raise ConfigError(
                f"compile={self.compile!r} is no scope",
                where="Recipe",
                fix=f"{', '.join(get_args(Scope))}, or nothing",
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in an update: `accumulate` times `data.window`, if that is a number."""
        return self.accumulate * (self.data.window if isinstance(self.data.window, int) else 1)
