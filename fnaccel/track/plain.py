"""Configs and metrics as plain values: other libraries take numbers, text and mappings of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

from fnaccel.tree import Tree


def plain(value: Tree) -> Any:
    """The value as mappings with text keys, lists, numbers and text. Any other object becomes its text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of nested mappings, by names such as `optimizer/lr`. A list becomes its text."""
    leaves = leaves_of(plain(config))
    return {name: str(value) if isinstance(value, list) else value for name, value in leaves}


def leaves_of(value: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """The names, such as `optimizer/lr`, and the values in nested mappings."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves_of(each, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def number_of(value: Any) -> float | None:
    """The float of a real number, or of an array or tensor of one element. None if the value is neither."""
    if isinstance(value, Real):
        return _as_float(value)
    if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
        element = value.item()
        return _as_float(element) if isinstance(element, Real) else None
    return None


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as Markdown, for libraries that show text and no tables."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), line("---" for _ in columns), *map(line, rows)])
