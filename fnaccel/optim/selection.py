"""Selections of parameters: patterns of names, or functions of a name and a parameter."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fnaccel.errors import ArgumentError
from fnaccel.models.parameter import Leaf, Select, takes
from fnaccel.step.callables import plan_text

Groups = Mapping[Select, Mapping[str, Any]] | Sequence[tuple[Select, Mapping[str, Any]]] | None
"""(selection, options) pairs, or a mapping of them."""


def pairs_of(groups: Groups) -> list[tuple[Select, dict[str, Any]]]:
    """Groups as pairs of a selection and its options."""
    items = groups.items() if isinstance(groups, Mapping) else groups or ()
    return [(select, dict(options)) for select, options in items]


def choose(selections: Sequence[Select], leaf: Leaf) -> int:
    """The index of the first selection that takes a parameter, -1 if none does. Raises as `takes`."""
    found = (number for number, each in enumerate(selections) if takes(each, leaf.name, leaf.shown))
    return next(found, -1)


def refuse_unmatched(
    selections: Sequence[Select],
    chosen: Iterable[int],
    optional: Sequence[Select],
    names: Sequence[str],
    where: str,
) -> None:
    """Raise ArgumentError for a selection that was chosen for no parameter. Names the nearest few."""
    used = set(chosen)
    for number, select in enumerate(selections):
        if number in used or select in optional:
            continue
        if isinstance(select, str) and any(fnmatch.fnmatchcase(name, select) for name in names):
            problem = "matches only parameters that an earlier one takes"
        else:
            problem = "matches no trainable parameter"
        raise ArgumentError(
            f"{plan_text(select)} {problem}",
            where=where,
            fix=_nearest_few(select, names) + ", or mark it as optional",
        )


def _nearest_few(select: Select, names: Sequence[str]) -> str:
    wanted = select.strip("*") if isinstance(select, str) else ""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or list(names[:3])
    return f"names look like {', '.join(map(repr, close))} ({len(names)} in all)"
