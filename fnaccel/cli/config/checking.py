"""`check_recipe`: what a run would refuse in a recipe, found without a model and data.

Strategies, transforms and optimizers are built here as a run builds them, so this file needs torch.
"""

from __future__ import annotations

import attrs

from fnaccel.cli.launch import job_of
from fnaccel.config import Recipe, scan_options
from fnaccel.config.applying import make_optimizer, transformed
from fnaccel.launch.job import check_values
from fnaccel.step.precision_policy import check_precision
from fnaccel.strategies import strategy


def check_recipe(recipe: Recipe) -> None:
    """Check names and values that a recipe itself does not check. Accelerators are not counted.

    Raises:
        ConfigError, UnknownNameError, ArgumentError: a name or a value that a run would refuse.
        LaunchError: the values of the section `launch` contradict each other.

    Example:
        >>> check_recipe(Recipe(strategy="fsdp"))
    """
    strategy(recipe.strategy)
    check_precision(recipe.precision, "precision")
    transformed(recipe, _no_loss)
    # a length in epochs needs the data
    for described in (recipe.optimizer, *recipe.optimizer.by_model.values()):
        lengths = described.schedule_options.values()
        if not described.by_pattern and not any(isinstance(length, str) for length in lengths):
            make_optimizer(attrs.evolve(described, by_model={}))
    scan_options(recipe)
    ranks = recipe.launch.ranks
    job = job_of(attrs.evolve(recipe.launch, ranks=1, cpu=not recipe.launch.tpu, gpus=None))
    check_values(attrs.evolve(job, processes=1 if ranks is None else ranks, cpu=recipe.launch.cpu))


def _no_loss(model: object, batch: object) -> None:
    """A loss function that is never called: transforms only need one to apply to."""
    del model, batch
