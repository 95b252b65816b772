"""`mistakes_of`: what a run would refuse in a recipe, found without a model and data.

Strategies, transforms and optimizers are built here as a run builds them, so this file needs torch.
"""

from __future__ import annotations

from typing import Any

import attrs

from fnaccel.cli.launch import job_of
from fnaccel.config import Recipe, scan_options
from fnaccel.config.applying import make_optimizer, transformed
from fnaccel.errors import FnaccelError
from fnaccel.launch.job import check_values
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.strategies import strategy


def mistakes_of(recipe: Recipe) -> list[FnaccelError]:
    """The names and values that a recipe itself does not check. Accelerators are not counted.

    Example:
        >>> mistakes_of(Recipe(strategy="fsdp"))
        []
    """
    checks: list[tuple[Any, ...]] = [
        (strategy, recipe.strategy),
        (transformed, recipe, lambda *_: None),  # a loss that is never called
        (scan_options, recipe),
        (_check_launch, recipe.launch),
    ]
    # a length in epochs needs the data
    for described in (recipe.optimizer, *recipe.optimizer.by_model.values()):
        lengths = described.schedule_options.values()
        if not described.by_pattern and not any(isinstance(length, str) for length in lengths):
            checks.append((make_optimizer, attrs.evolve(described, by_model={})))
    mistakes: list[FnaccelError] = []
    for check, *arguments in checks:
        try:
            check(*arguments)
        except FnaccelError as error:
            mistakes.append(error)
    return mistakes


def _check_launch(launch: LaunchRecipe) -> None:
    job = job_of(attrs.evolve(launch, ranks=1, cpu=not launch.tpu, gpus=None))
    check_values(attrs.evolve(job, processes=1 if launch.ranks is None else launch.ranks, cpu=launch.cpu))
