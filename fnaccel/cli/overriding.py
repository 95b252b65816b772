"""Overrides of a recipe on the command line: flags, a file and `--set` become checked dotted fields."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

import attrs

from fnaccel.config import Recipe, from_yaml
from fnaccel.config.yaml import load, override
from fnaccel.errors import LaunchError
from fnaccel.step.precision_policy import check_precision
from fnaccel.strategies import strategy

FLAGS = ("strategy", "precision", "accumulate", "clip_norm", "compile", "attention")
"""Options with the name of the recipe's field that they set."""
INNER_FLAGS = {
    "compile_backend": "compile_options.backend",
    "compile_mode": "compile_options.mode",
    "fp8_backend": "fp8.backend",
    "fp8_recipe": "fp8.recipe",
}
"""Options that set a part of a field."""


def gather_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Dotted fields and values. Flags go over the file, and `--set` goes over both.

    Raises:
        ConfigError: the file does not exist, or is not a recipe.
        LaunchError: `--set` without `=`.
    """
    overrides: dict[str, Any] = {}
    if options.config is not None:
        overrides |= _fields_of(Path(options.config))
    overrides |= {name: getattr(options, name) for name in FLAGS if getattr(options, name) is not None}
    overrides |= {
        field: getattr(options, name)
        for name, field in INNER_FLAGS.items()
        if getattr(options, name) is not None
    }
    for text in options.fields:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise LaunchError(
                f"{text!r} sets nothing", where="fnaccel launch --set", fix="--set optimizer.lr=1e-4"
            )
        overrides[field.strip()] = parse_value(value)
    return overrides


def parse_value(text: str) -> Any:
    """A value as JSON or Python writes it. Any other text is itself.

    YAML would not do: it reads `1e-4` as text.

    Example:
        >>> parse_value("1e-4"), parse_value("bf16")
        (0.0001, 'bf16')
    """
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def check_overrides(overrides: dict[str, Any]) -> None:
    """Check that a recipe accepts the overrides, before any rank starts.

    Raises:
        ConfigError: an unknown field, or a value of the wrong kind.
        ArgumentError: a number outside its range.
        UnknownNameError: no such strategy or precision. Names the nearest.
    """
    if not overrides:
        return
    # the flags alone first: the recipe names the wrong value, a converter only the field
    attrs.evolve(Recipe(), **{name: overrides[name] for name in FLAGS if name in overrides})
    recipe = override(Recipe(), overrides)
    strategy(recipe.strategy)
    check_precision(recipe.precision, "fnaccel launch --precision")


def _fields_of(path: Path) -> dict[str, Any]:
    from_yaml(path)
    # the text and not the recipe: a field that the file sets to its default is an override too
    plain: dict[str, Any] = load(path.read_text(encoding="utf-8"))
    defaults = Recipe()
    fields: dict[str, Any] = {}
    for name, value in plain.items():
        if attrs.has(type(getattr(defaults, name))):
            fields |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            fields[name] = value
    return fields
