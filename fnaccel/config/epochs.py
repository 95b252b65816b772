"""Lengths of schedules that a recipe gives in epochs or as a share: `total: "3 epochs"`, `warmup: "10%"`."""

from __future__ import annotations

import re
from typing import Any

import attrs

from fnaccel.config.recipes import OptimizerRecipe
from fnaccel.data import Shards
from fnaccel.errors import ConfigError
from fnaccel.strategies import strategy as parse
from fnaccel.world.world import World

_EPOCHS = re.compile(r"(\d+(?:\.\d+)?) epochs?")
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def in_updates(
    described: OptimizerRecipe, shards: Shards | None, strategy: str, world: World | None
) -> OptimizerRecipe:
    """An optimizer recipe whose schedules count updates.

    Args:
        described: with lengths in updates, in epochs, or as a share of `total`.
        shards: the data, whose epochs are counted.
        strategy: of the train step: it says how many ranks share a batch.
        world: the world. By default the one that `fa.start()` set.

    Raises:
        ConfigError: epochs without data, a share without a total, or a text that is neither.
    """
    options = dict(described.schedule_options)
    total = options.get("total")
    for name in ("total", *(name for name in options if name not in ("total", "shape"))):
        if isinstance(options.get(name), str):
            options[name] = _updates(name, options[name], total, shards, strategy, world)
            total = options.get("total")
    patterns, models = (
        {name: in_updates(other, shards, strategy, world) for name, other in others.items()}
        for others in (described.by_pattern, described.by_model)
    )
    return attrs.evolve(described, schedule_options=options, by_pattern=patterns, by_model=models)


def _updates(
    name: str, text: str, total: Any, shards: Shards | None, strategy: str, world: World | None
) -> int:
    where = f"optimizer.schedule_options.{name}"
    epochs, share = _EPOCHS.fullmatch(text), _SHARE.fullmatch(text)
    if epochs is not None:
        if shards is None:
            raise ConfigError(
                f"{text!r} counts epochs, and no data is given",
                where=where,
                fix="fa.config.apply(recipe, loss_fn, model, shards=shards)",
            )
        number = float(epochs[1])
        if number.is_integer():
            return shards.updates_per_epoch(parse(strategy), epochs=int(number), world=world)
        return round(number * shards.updates_per_epoch(parse(strategy), world=world))
    if share is not None and name != "total" and isinstance(total, int):
        return round(float(share[1]) / 100 * total)
    raise ConfigError(
        f"{text!r} is no number of updates",
        where=where,
        fix='a number, "3 epochs", or for a warm-up "10%" of total',
    )
