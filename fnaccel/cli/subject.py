"""The recipe that the options of `fnaccel plan` and `fnaccel bench` describe."""

from __future__ import annotations

import argparse
from pathlib import Path

import attrs

from fnaccel.config import Recipe, from_yaml
from fnaccel.step.precision_policy import check_precision


def recipe_of(options: argparse.Namespace, prog: str) -> Recipe:
    """The recipe of `--config`, with the other options over it.

    Args:
        options: with those of `fnaccel.cli.options.subject`.
        prog: the command, for errors.

    Raises:
        ConfigError, UnknownNameError, ArgumentError: the file or an option is wrong.
    """
    base = Recipe() if options.config is None else from_yaml(Path(options.config))
    flags = {name: getattr(options, name) for name in ("strategy", "precision", "accumulate", "clip_norm")}
    if options.optimizer is not None:
        flags["optimizer"] = attrs.evolve(base.optimizer, name=options.optimizer)
    recipe = attrs.evolve(base, **{name: value for name, value in flags.items() if value is not None})
    check_precision(recipe.precision, f"{prog} --precision")
    return recipe
