"""Selects and renames the paths of a tree: `only=`, `skip=` and `rename=`.

This module sees names and no values.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping

import attrs

from fnaccel.errors import ArgumentError, nearest

Patterns = str | Iterable[str] | None
"""One or several shell patterns of paths. A pattern also matches all paths below a path that it matches."""

Rename = Mapping[str, str] | Callable[[str], str] | None
"""Regular expressions and their replacements, in order (`re.sub`), or a function of the path."""


@attrs.frozen
class Kept:
    """Marks the places of a tree that stay unchanged."""


KEEP = Kept()


def choose(names: Iterable[str], only: Patterns, skip: Patterns, where: str) -> set[str]:
    """The names that `only` matches (all, if it is None) and `skip` does not.

    Args:
        names: paths such as `params/head.weight`.
        only: `"params"`, `"params/encoder.*"`, or several.
        skip: patterns like those of `only`.
        where: the public function, for messages.

    Raises:
        ArgumentError: a pattern of `only` that matches nothing.

    Example:
        >>> choose(["params/a.weight", "params/a.bias", "buffers/mean"], "params", ["*.bias"], "fa.restore")
        {'params/a.weight'}
    """
    paths = set(names)
    chosen = paths
    if only is not None:
        chosen = set()
        for pattern in _several(only):
            matches = {name for name in paths if _matches(name, pattern)}
            if not matches:
                raise ArgumentError(
                    f"only={pattern!r} matches no path", where=where, fix=nearest(pattern, _tops(paths))
                )
            chosen |= matches
    without = _several(skip)
    return {name for name in chosen if not any(_matches(name, pattern) for pattern in without)}


def renamed(names: Iterable[str], rename: Rename, where: str) -> dict[str, str]:
    """The new name of each name.

    Args:
        names: paths.
        rename: see `Rename`.
        where: the public function, for messages.

    Raises:
        ArgumentError: two names become one, an expression that matches nothing, or one that is none.

    Example:
        >>> renamed(["params/encoder.weight"], {r"^params/encoder\\.": "params/backbone."}, "fa.restore")
        {'params/encoder.weight': 'params/backbone.weight'}
    """
    unused = set(rename) if isinstance(rename, Mapping) else set[str]()
    change = _changer(rename, where, unused)
    new_names = {name: change(name) for name in names}
    if unused:
        pattern = min(unused)
        raise ArgumentError(
            f"rename= holds {pattern!r}, which matches no path",
            where=where,
            fix=nearest(re.sub(r"[\\^$]", "", pattern), _tops(new_names)),
        )
    first: dict[str, str] = {}
    for old, new in new_names.items():
        if first.setdefault(new, old) != old:
            raise ArgumentError(
                f"rename= makes {first[new]} and {old} both {new}",
                where=where,
                fix="let the expressions tell them apart, or leave one out with skip=",
            )
    return new_names


def _changer(rename: Rename, where: str, unused: set[str]) -> Callable[[str], str]:
    """A function of one name. It takes each expression that matches out of `unused`."""
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise ArgumentError(
                f"rename= is a {type(rename).__name__}",
                where=where,
                fix=r'give a dict, such as {r"^params/encoder\.": "params/backbone."}, or a function',
            )
        return rename
    try:
        pairs = [(re.compile(pattern), to) for pattern, to in rename.items()]
    except re.error as error:
        raise ArgumentError(
            f"rename= holds {error.pattern!r}, which is no regular expression: {error.msg}",
            where=where,
            fix=r"escape literal characters: \. for a dot",
        ) from None
    except TypeError:
        raise ArgumentError(
            "rename= holds something else than text", where=where, fix='give text: {r"^a": "b"}'
        ) from None

    def change(name: str) -> str:
        for pattern, to in pairs:
            try:
                name, times = pattern.subn(to, name)
            except (re.error, IndexError, TypeError) as error:
                raise ArgumentError(
                    f"rename= puts {to!r} in the place of {pattern.pattern!r}, which can't be: {error}",
                    where=where,
                    fix=r"\1 is the match of the first (...) of the expression, and \\ is a backslash",
                ) from None
            if times:
                unused.discard(pattern.pattern)
        return name

    return change


def _several(patterns: Patterns) -> list[str]:
    if patterns is None:
        return []
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def _tops(names: Iterable[str]) -> list[str]:
    return sorted({name.partition("/")[0] for name in names} | set(names))
