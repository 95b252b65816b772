"""Selections of parameters: patterns of names, or functions of a name and a parameter."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fnaccel.errors import ArgumentError
from fnaccel.models.parameter import Leaf
from fnaccel.step.callables import plan_text

Select = str | Callable[[str, Any], bool]
"""A pattern of parameter names, as a shell matches them, or a function `(name, parameter) -> bool`."""
Groups = Mapping[Select, Mapping[str, Any]] | Sequence[tuple[Select, Mapping[str, Any]]] | None
"""(selection, options) pairs, or a mapping of them."""


def selector_name(select: Select) -> str:
    """A selection in messages and plans: a pattern in quotes, a function by its name."""
    return plan_text(select)


def pairs_of(groups: Groups) -> list[tuple[Select, dict[str, Any]]]:
    """Groups as pairs of a selection and its options."""
    items = groups.items() if isinstance(groups, Mapping) else groups or ()
    return [(select, dict(options)) for select, options in items]


def choose(selections: Sequence[Select], leaf: Leaf) -> int:
    """The index of the first selection that takes a parameter, -1 if none does.

    Raises:
        ArgumentError: a function that gives no bool.
    """
    for number, select in enumerate(selections):
        if isinstance(select, str):
            taken: object = fnmatch.fnmatchcase(leaf.name, select)
        else:
            taken = _asked(select, leaf)
        if not isinstance(taken, bool):
            raise ArgumentError(
                f"{selector_name(select)} gave {taken!r} for {leaf.name!r}",
                where="the selection of parameters",
                fix="return True or False: lambda name, parameter: parameter.ndim == 2",
            )
        if taken:
            return number
    return -1


def _asked(select: Callable[[str, Any], bool], leaf: Leaf) -> object:
    try:
        return select(leaf.name, leaf.shown)
    except TypeError as error:
        raise ArgumentError(
            f"{selector_name(select)} can't select parameters: {error}",
            where="the selection of parameters",
            fix="take two arguments: lambda name, parameter: parameter.ndim == 2",
        ) from error


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
            f"{selector_name(select)} {problem}",
            where=where,
            fix=_nearest_few(select, names) + ", or mark it as optional",
        )


def _nearest_few(select: Select, names: Sequence[str]) -> str:
    wanted = select.strip("*") if isinstance(select, str) else ""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or list(names[:3])
    return f"names look like {', '.join(map(repr, close))} ({len(names)} in all)"
