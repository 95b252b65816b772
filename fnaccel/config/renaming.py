"""Earlier names of a recipe's keys. A replacement leaves the rest of the text as it is, comments included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from fnaccel import _lazy
from fnaccel.config.yaml import from_yaml, text_of
from fnaccel.errors import ConfigError
from fnaccel.world.plain_data import load_yaml

RENAMED: dict[str, str] = {}
"""Dotted earlier name -> the current name of its last part. No key of a released version was renamed yet."""
_COMMAND = "fnaccel config update"


def renamed(path: Path, table: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The text of a recipe before and after its keys have their current names.

    Args:
        path: the file.
        table: dotted earlier names and current last names. None: those of this version.

    Raises:
        ConfigError: there is no such file, it belongs to another tool, or the result is no recipe.

    Example:
        >>> Path("r.yaml").write_text("launch: {procs: 2}  # one machine")
        >>> renamed(Path("r.yaml"), {"launch.procs": "ranks"})[1]
        'launch: {ranks: 2}  # one machine'
    """
    before = after = text_of(path, _COMMAND)
    table = RENAMED if table is None else table
    try:
        plain, root = load_yaml(before), yaml.compose(before, yaml.SafeLoader)
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"this is not YAML: {text}", where=str(path), fix="correct the line it names"
        ) from error
    keys = [(node, table[name]) for name, node in _keys_of(root) if name in table]
    # from the end, so that the earlier positions stay valid
    for node, name in sorted(keys, key=lambda pair: -pair[0].start_mark.index):
        after = after[: node.start_mark.index] + name + after[node.end_mark.index :]
    try:
        from_yaml(after)
    except ConfigError as error:
        tool = _lazy.load("fnaccel.config.importing.files").tool_of(plain)
        if tool is None:
            raise
        raise ConfigError(
            f"{path} is a file of {tool}, and no recipe", where=_COMMAND, fix=f"fnaccel config import {path}"
        ) from error
    return before, after


def _keys_of(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key
            yield from _keys_of(value, f"{prefix}{key.value}.")
