"""Fields of a recipe on the command line: a file, FNACCEL_SET and options become checked dotted fields."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fnaccel.cli.options.config import DEFAULT_FILE
from fnaccel.config import Recipe, from_yaml
from fnaccel.config.yaml import override, text_of
from fnaccel.launch.options import flags_of, read_pair
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.step.precision_policy import check_precision
from fnaccel.strategies import strategy
from fnaccel.world import settings
from fnaccel.world.flags import FLAGS
from fnaccel.world.plain_data import load_yaml
from fnaccel.world.settings import parse_value as parse_value


@attrs.frozen
class Layer:
    """Fields of a recipe from one source.

    Attributes:
        source: the path of a file, `"FNACCEL_SET"` or `"flag"`.
        fields: dotted fields and their values.
        where: the source as an error names it.
    """

    source: str
    fields: dict[str, Any]
    where: str


def layers(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Layer]:
    """The fields of each source. A later source goes over an earlier one.

    Args:
        options: of `fnaccel launch` or `fnaccel config show`. An option that is absent sets nothing.
        environ: the environment, for FNACCEL_SET.

    Raises:
        ConfigError: the file does not exist, or is not a recipe. FNACCEL_SET can't be read.
        LaunchError: `--set` without `=`, or `--nnodes` is no number of machines.
    """
    sources: list[Layer] = []
    path = config_file(options)
    if path is not None:
        sources.append(file_layer(path))
    chosen = settings.read(environ)
    if chosen:
        sources.append(Layer(settings.VARIABLE, chosen, settings.VARIABLE))
    flags = _flags(options)
    if flags:
        sources.append(Layer("flag", flags, "the options of fnaccel"))
    return sources


def config_file(options: argparse.Namespace) -> Path | None:
    """The file of `--config`, else ./fnaccel.yaml if it exists. Never a file of another folder.

    None with `--no-config`, whose value is an empty text.
    """
    if options.config is not None:
        return Path(options.config) if options.config else None
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None


def notices(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """One line for each source that the command does not name."""
    lines: list[str] = []
    if options.config is None and config_file(options) is not None:
        lines.append(f"fnaccel: ./{DEFAULT_FILE} is the recipe, since it is here and --config is not given")
    if environ.get(settings.VARIABLE, "").strip():
        lines.append(f"fnaccel: {settings.VARIABLE} sets {environ[settings.VARIABLE].strip()}")
    return lines


def gather_overrides(sources: Sequence[Layer]) -> dict[str, Any]:
    """The fields of all sources together, in an order that `override` can apply."""
    merged: dict[str, Any] = {}
    for source in sources:
        for field, value in source.fields.items():
            # `launch.env` of a later source removes `launch.env.A` of an earlier one
            for earlier in [name for name in merged if name == field or name.startswith(f"{field}.")]:
                del merged[earlier]
            merged[field] = value
    return merged


def check_overrides(sources: Sequence[Layer]) -> Recipe:
    """The default recipe with the fields of all sources. Called before any rank starts.

    Raises:
        ConfigError: an unknown field, or a value of the wrong kind.
        ArgumentError: a number outside its range.
        UnknownNameError: no such strategy or precision. Names the nearest.
    """
    recipe = Recipe()
    for source in sources:
        # the flags alone first: the recipe names the wrong value, a converter only the field
        with contextlib.suppress(TypeError):  # a value of another kind, which `override` names
            attrs.evolve(Recipe(), **{name: source.fields[name] for name in FLAGS if name in source.fields})
        recipe = override(recipe, source.fields, source.where)
    if sources:
        strategy(recipe.strategy)
        check_precision(recipe.precision, "fnaccel launch --precision")
    return recipe


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the options. An option is stored under its dotted field: see `cli/options/launch.py`."""
    of_launch = {name: option for name, option, _ in flags_of(LaunchRecipe, "launch.")}
    of_recipe = {field.name for field in attrs.fields(Recipe)}
    fields: dict[str, Any] = {}
    for name, value in vars(options).items():
        if value is None or name.partition(".")[0] not in of_recipe:
            continue
        if name in of_launch and (read := of_launch[name].read) is not None:
            fields |= {f"launch.{key}": each for key, each in read(value).items()}
        else:
            fields[name] = value
    for text in getattr(options, "fields", ()):
        name, value = read_pair(text, "--set", "--set optimizer.lr=1e-4")
        fields[name.strip()] = parse_value(value)
    return fields


def file_layer(path: Path) -> Layer:
    """The fields of a file.

    Raises:
        ConfigError: the file does not exist, or is not a recipe.
    """
    from_yaml(path)
    # the text and not the recipe: a field that the file sets to its default is an override too
    plain: dict[str, Any] = load_yaml(text_of(path, "a recipe"))
    defaults = Recipe()
    fields: dict[str, Any] = {}
    for name, value in plain.items():
        if attrs.has(type(getattr(defaults, name))):
            fields |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            fields[name] = value
    return Layer(str(path), fields, str(path))
