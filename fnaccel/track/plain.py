"""Configs as plain values: other libraries take numbers, text and mappings of them, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    return dict(_leaves(plain(config), ""))


def _leaves(value: Tree, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}" if name else key)
    else:
        yield name, str(value) if isinstance(value, list) else value


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as Markdown, for libraries that show text and no tables."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), line("---" for _ in columns), *map(line, rows)])
