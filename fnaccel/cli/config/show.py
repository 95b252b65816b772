"""`fnaccel config show`: each value of the recipe that a launch would use, and its source."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import attrs

from fnaccel.cli.options import config as options_of
from fnaccel.cli.overriding import Layer, check_overrides, layers
from fnaccel.cli.terminal import columns, print_json
from fnaccel.config import Recipe


def run(arguments: Sequence[str]) -> int:
    """Print the recipe as a table, or as JSON."""
    parsed = options_of.show().parse_args(arguments)
    sources = layers(_without(parsed, "json"), os.environ)
    rows = sourced(check_overrides(sources), sources)
    if parsed.json:
        print_json([dict(zip(("key", "value", "source"), row, strict=True)) for row in rows])
    else:
        print(columns([(key, source, _text(value)) for key, value, source in rows], "<<"))
    return 0


def sourced(recipe: Recipe, sources: Sequence[Layer]) -> list[tuple[str, Any, str]]:
    """The dotted key, the value and the source of each field of a recipe.

    Args:
        recipe: the default recipe with the fields of all sources.
        sources: a later source goes over an earlier one.

    Example:
        >>> rows = sourced(Recipe(strategy="ddp"), [Layer("flag", {"strategy": "ddp"}, "flag")])
        >>> rows[0]
        ('strategy', 'ddp', 'flag')
    """
    fields: dict[str, Any] = {}
    for name, value in attrs.asdict(recipe, recurse=False).items():
        if attrs.has(type(value)):
            inner = attrs.asdict(value, recurse=False)
            fields |= {f"{name}.{key}": each for key, each in inner.items()}
        else:
            fields[name] = value
    return [(key, value, _source(key, sources)) for key, value in fields.items()]


def _source(key: str, sources: Sequence[Layer]) -> str:
    """The last source that sets a field, or a part of it: `launch.env.A` sets `launch.env`."""
    names = [
        source.source
        for source in sources
        if any(field == key or field.startswith(f"{key}.") for field in source.fields)
    ]
    return names[-1] if names else "default"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _without(parsed: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{key: value for key, value in vars(parsed).items() if key != name})
