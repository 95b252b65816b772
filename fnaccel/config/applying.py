"""`apply`: a recipe, a loss and a model become a train step. `recipe`: the launcher's hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs

from fnaccel import optim
from fnaccel.config.epochs import in_updates
from fnaccel.config.recipes import OptimizerRecipe, Recipe
from fnaccel.config.references import load
from fnaccel.config.yaml import from_yaml, override
from fnaccel.data import Shards
from fnaccel.errors import ArgumentError, ConfigError, UnknownNameError, nearest, require
from fnaccel.loop.autosave import Autosave
from fnaccel.loop.measured import Watch
from fnaccel.loop.tracking import Tracking
from fnaccel.optim import Optimizer, OptimizerGroups, schedules
from fnaccel.optim.several import OptimizerLike
from fnaccel.program.train_step import TrainStep, train_step
from fnaccel.seeing.logging import set_level
from fnaccel.step.step import Step, as_step
from fnaccel.strategies import distribute
from fnaccel.strategies.distribute import Model
from fnaccel.track.registry import find as find_tracker
from fnaccel.transforms.from_fields import KINDS, OPTIONS, transforms_of
from fnaccel.world import flags
from fnaccel.world.world import World

_OPTIMIZERS = ("sgd", "adam", "adamw", "adafactor", "from_deepspeed")
_SCHEDULES = {
    name: getattr(schedules, name)
    for name in (
        "constant", "linear", "cosine", "inverse_sqrt", "one_cycle", "piecewise",
        "warmup_constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay",
    )
} | {"deepspeed_lr": optim.deepspeed_lr}  # fmt: skip


def recipe(default: Recipe | str | None = None) -> Recipe:
    """The recipe of this run: the script's own, updated by the options of the launcher.

    This is the hook of `fnaccel launch --strategy fsdp --precision bf16 --set optimizer.lr=1e-4`, and of
    the variable `FNACCEL_SET="strategy=fsdp optimizer.lr=1e-4"` under every launcher and
    plain `python`. It also sets the level of `fa.seeing.get_logger`, if the recipe has a `tracking.level`. If
    the launcher was told something and the script never calls this, the launcher raises.

    Args:
        default: the script's recipe, a YAML file of one, or None for the defaults.

    Raises:
        ConfigError: an override that a recipe has no place for.

    Example:
        >>> recipe = fa.config.recipe(fa.config.Recipe(strategy="local", clip_norm=1.0))
        >>> recipe.clip_norm
        1.0
    """
    base = from_yaml(default) if isinstance(default, str) else default or Recipe()
    chosen = override(base, flags.take_for_recipe(), "the overrides of fa.config.recipe")
    if chosen.tracking.level is not None:
        set_level(chosen.tracking.level)
    return chosen


def make_optimizer(described: OptimizerRecipe) -> Optimizer | OptimizerGroups:
    """The optimizer that a recipe describes.

    Raises:
        UnknownNameError: no such optimizer or schedule.
        ConfigError: options that it does not take.
    """
    base = optim.starting_at(described.starts, _one_optimizer(described))
    if not described.by_pattern:
        return base
    members = [(pattern, make_optimizer(other)) for pattern, other in described.by_pattern.items()]
    for pattern, other in members:
        require(
            isinstance(other, Optimizer) and not described.by_pattern[pattern].by_model,
            f"the optimizer of {pattern!r} has a by_pattern or a by_model of its own",
            "optimizer.by_pattern",
            "write all patterns in one by_pattern",
        )
    return optim.optimizer_groups([*members, ("*", base)])  # pyright: ignore[reportArgumentType] - checked above


def _one_optimizer(described: OptimizerRecipe) -> Optimizer:
    rate = _make_schedule(described)
    options: dict[str, Any] = {**described.options, "groups": described.groups or None}
    try:
        if described.name in _OPTIMIZERS:
            return getattr(optim, described.name)(rate, **options)
        if ":" in described.name:
            return optim.from_torch(load(described.name, "optimizer.name"), lr=rate, **options)
    except TypeError as error:
        raise _wrong_options("optimizer.options", described.name, error) from error
    raise UnknownNameError(
        f"no optimizer is called {described.name!r}",
        where="optimizer.name",
        fix=nearest(described.name, _OPTIMIZERS) + ', or "module:Class"',
    )


def _make_schedule(described: OptimizerRecipe) -> Any:
    name, options = described.schedule, described.schedule_options
    if callable(name):
        return name
    if ":" in name:
        return load(name, "optimizer.schedule")
    if name not in _SCHEDULES:
        raise UnknownNameError(
            f"no schedule is called {name!r}", where="optimizer.schedule", fix=nearest(name, _SCHEDULES)
        )
    try:
        return _SCHEDULES[name](described.lr, **options)
    except TypeError as error:
        raise _wrong_options("optimizer.schedule_options", name, error) from error


def _wrong_options(where: str, name: str, error: TypeError) -> ConfigError:
    return ConfigError(
        f"{name} can't take these options: {error}", where=where, fix="see the options of fa." + name
    )


def transformed(recipe_: Recipe, loss_fn: Callable[..., Any]) -> Step:
    """The loss function under the transforms that a recipe names, in the recipe's order."""
    step = as_step(loss_fn, "fa.config.apply")
    for transform in transforms_of({name: getattr(recipe_, name) for name in (*KINDS, *OPTIONS)}).values():
        step = step if transform is None else transform(step)
    return under_own(recipe_, step)


def under_own(recipe_: Recipe, step: Any) -> Step:
    """A step under the user's transforms that a recipe names."""
    for reference in recipe_.transforms:
        transform = load(reference, "transforms")
        if not callable(transform):
            raise ConfigError(
                f"{reference!r} is no transform", where="transforms", fix='write "module:name" of a function'
            )
        step = transform(step)
    return step


def apply(
    recipe_: Recipe,
    loss_fn: Callable[..., Any],
    model: Model | Mapping[str, Model],
    *,
    shards: Shards | None = None,
    world: World | None = None,
) -> TrainStep:
    """The train step that a recipe describes.

    Args:
        recipe_: the choices.
        loss_fn: `loss_fn(model, batch)`, or a step with transforms of its own.
        model: a factory, a module, or a dict of them, as for `fa.distribute`.
        shards: the data, if the recipe gives lengths in epochs: `total: "3 epochs"`.
        world: the world. By default the one that `fa.start()` set.

    Raises:
        ConfigError, UnknownNameError: a choice that does not exist, or epochs without `shards`.

    Example:
        >>> train_step = fa.config.apply(fa.config.recipe(), loss_fn, GPT)
        >>> state = train_step.init(seed=0)
    """
    if not isinstance(recipe_, Recipe):
        raise ArgumentError(
            f"a recipe is not {type(recipe_).__name__}",
            where="fa.config.apply",
            fix="fa.config.apply(fa.config.Recipe(...), loss_fn, model)",
        )
    return train_step(
        transformed(recipe_, loss_fn),
        model=distribute(model, recipe_.strategy),
        optimizer=_optimizers(in_updates(recipe_.optimizer, shards, recipe_.strategy, world), model),
        world=world,
    )


def _optimizers(described: OptimizerRecipe, model: object) -> OptimizerLike:
    """The optimizer of a model, or a dict of them for a dict of models."""
    if not described.by_model:
        return make_optimizer(described)
    names = list(cast("Mapping[str, Any]", model)) if isinstance(model, Mapping) else []
    unknown = next((name for name in described.by_model if name not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"there is no model {unknown!r}",
            where="optimizer.by_model",
            fix=nearest(unknown, names) if names else "give a dict of models: {'g': ..., 'd': ...}",
        )
    base = attrs.evolve(described, by_model={})
    return {name: make_optimizer(described.by_model.get(name, base)) for name in names}


def scan_options(recipe_: Recipe) -> dict[str, Any]:
    """The options of a recipe for `fa.scan(train_step, state, shards, **options)`.

    They are the length, the saving, and the trackers, if the recipe has them.

    A script that has a length of its own puts it first, and the recipe goes over it:
    `fa.scan(train_step, state, shards, **{"epochs": 3, **options})`.

    Raises:
        UnknownNameError: no tracker has the name that the recipe gives.
        ConfigError: a reference to a tracker that can't be imported.

    Example:
        >>> recipe = fa.config.Recipe(checkpoint=fa.config.CheckpointRecipe(directory="runs/gpt"))
        >>> options = fa.config.scan_options(recipe)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), **options):
        ...     pass
        >>> fa.checkpoint.latest("runs/gpt").name
        'step-0000000003'
    """
    plan, tracking, run = recipe_.checkpoint, recipe_.tracking, recipe_.run
    options: dict[str, Any] = {"steps": run.steps, "epochs": run.epochs}
    if plan.directory is not None:
        options["save"] = Autosave(
            plan.directory,
            every=plan.every,
            keep=plan.keep,
            keep_every=plan.keep_every,
            each_machine=plan.each_machine,
            background=plan.background,
        )
    if tracking.trackers or tracking.report:
        trackers = map(_tracker, tracking.trackers)
        options["track"] = Tracking(*trackers, every=tracking.log_every, report=tracking.report)
    if tracking.throughput or tracking.memory or tracking.profile:
        options["watch"] = Watch(
            profile=tracking.profile, throughput=tracking.throughput, memory=tracking.memory
        )
    return {name: option for name, option in options.items() if option is not None}


def _tracker(entry: str | Mapping[str, Any]) -> dict[str, Any] | str:
    """An entry for `fa.Tracking`: a reference is loaded, and a name is checked before training."""
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, where = options["name"], "tracking.trackers"
    if name == "all":
        return name
    if isinstance(name, str) and ":" in name:
        options["name"] = load(name, where)
    else:
        find_tracker(name, where)
    return options


def shard_options(recipe_: Recipe) -> dict[str, Any]:
    """The options of a recipe for `fa.shard(loader, **options)`.

    Example:
        >>> shards = fa.shard(loader, **fa.config.shard_options(fa.config.recipe()))
    """
    data = recipe_.data
    return {
        "window": load(data.window, "data.window") if isinstance(data.window, str) else data.window,
        "across_epochs": data.across_epochs,
        "remainder": data.remainder,
        "seed": recipe_.run.seed if data.seed is None else data.seed,
        "per_rank": data.per_rank,
        "dispatch": data.dispatch,
        "prefetch": data.prefetch,
        "device_placement": data.device_placement,
        "copies": data.copies,
        "rows_per_sample": data.rows_per_sample,
        "accept_changes": data.accept_changes,
    }
