"""The fields of a recipe that the options of `fnaccel plan` and `estimate` set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnaccel.cli.overriding import Layer, file_layer, gather_overrides
from fnaccel.config import Recipe
from fnaccel.config.yaml import override
from fnaccel.program.launcher_flags import STEP_FIELDS
from fnaccel.step.precision_policy import check_precision
from fnaccel.world import settings


def fields_of(options: argparse.Namespace, prog: str) -> dict[str, Any]:
    """Dotted fields of `--config`, of FNACCEL_SET over it, and of the other options over both.

    Args:
        options: with those of `fnaccel.cli.options.subject`.
        prog: the command, for errors.

    Raises:
        ConfigError: the file is not a recipe, or FNACCEL_SET can't be read.
    """
    flags = {name: getattr(options, name) for name in ("strategy", "precision", "accumulate", "clip_norm")}
    flags |= {"optimizer.name": options.optimizer, "remat": getattr(options, "remat", False) or None}
    chosen = {name: value for name, value in flags.items() if value is not None}
    sources = [] if options.config is None else [file_layer(Path(options.config))]
    sources += [
        Layer(settings.VARIABLE, settings.read(os.environ), settings.VARIABLE),
        Layer("flag", chosen, prog),
    ]
    return gather_overrides(sources)


def step_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the fields that a train step can use."""
    return {name: value for name, value in fields.items() if name.partition(".")[0] in STEP_FIELDS}


def recipe_of(fields: dict[str, Any], prog: str) -> Recipe:
    """The recipe that the fields make.

    Raises:
        ConfigError, UnknownNameError, ArgumentError: the file, FNACCEL_SET or an option is wrong.
    """
    recipe = override(Recipe(), fields, prog)
    check_precision(recipe.precision, f"{prog} --precision")
    return recipe
