"""`fnaccel config show`: each value of the recipe that a launch would use, and its source."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from fnaccel.cli.options import config as options_of
from fnaccel.cli.overriding import Layer, check_overrides, layers
from fnaccel.cli.terminal import columns, print_json
from fnaccel.config import Recipe


def run(arguments: Sequence[str]) -> int:
    """Print the recipe as a table, or as JSON."""
    parsed = options_of.show().parse_args(arguments)
    as_json = vars(parsed).pop("json")
    sources = layers(parsed, os.environ)
    rows = sourced(check_overrides(sources), sources)
    if as_json:
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
    return [(key, value, _source(key, sources)) for key, value in _fields(recipe, "")]


def _fields(record: Any, parent: str) -> Iterator[tuple[str, Any]]:
    for name, plain in attrs.asdict(record).items():
        value, key = getattr(record, name), f"{parent}{name}"
        yield from _fields(value, f"{key}.") if attrs.has(type(value)) else [(key, plain)]


def _source(key: str, sources: Sequence[Layer]) -> str:
    """The last source that sets a field, a part of it (`launch.env.A` sets `launch.env`), or its section."""
    names = [
        source.source
        for source in sources
        for field, value in source.fields.items()
        if f"{field}.".startswith(f"{key}.")
        or (key[: len(field) + 1] == f"{field}." and key[len(field) + 1 :] in value)
    ]
    return names[-1] if names else "default"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
