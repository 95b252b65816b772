"""The layers that a transform takes or leaves, with reasons, and their short list in a plan."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from fnaccel.errors import ArgumentError, nearest


@attrs.frozen
class Layers:
    """Which layers were changed.

    Attributes:
        converted: their paths, in the order of the model.
        skipped: why a layer of the same kind was left as it is, by path.
    """

    converted: tuple[str, ...]
    skipped: Mapping[str, str]

    def describe(self) -> list[str]:
        """One line of converted layers, and one for each reason to skip."""
        lines = [folded(self.converted) or "none"]
        reasons: dict[str, list[str]] = {}
        for path, why in self.skipped.items():
            reasons.setdefault(why, []).append(path)
        return lines + [f"not {folded(paths)}: {why}" for why, paths in reasons.items()]


def matches(path: str, patterns: Iterable[str], names: Iterable[str] = ("weight",)) -> str | None:
    """The first pattern that matches a module's path or the path of one of its parameters."""
    paths = [path, *(f"{path}.{name}" if path else name for name in names)]
    return next((p for p in patterns if any(fnmatch.fnmatchcase(candidate, p) for candidate in paths)), None)


def check_patterns(patterns: Iterable[str], model: nn.Module, where: str) -> None:
    """See that each pattern matches a module or a parameter.

    Raises:
        ArgumentError: a pattern matches nothing. Names the nearest.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(
                f"the pattern {pattern!r} matches no layer", where=where, fix=nearest(pattern, names)
            )


def folded(paths: Iterable[str]) -> str:
    """Paths that differ in one number as one: `blocks.0-11.up`.

    Example:
        >>> folded(["a.0.up", "a.1.up", "out"])
        'a.0-1.up, out'
    """
    groups: dict[str, list[int]] = {}
    for path in paths:
        number = re.search(r"(?<![^.])\d+(?![^.])", path)
        if number is None:
            groups.setdefault(path, [])
        else:
            groups.setdefault(f"{path[: number.start()]}#{path[number.end() :]}", []).append(int(number[0]))
    return ", ".join(
        key.replace("#", _ranges(numbers), 1) if numbers else key for key, numbers in groups.items()
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return text[0] if len(text) == 1 else f"{{{','.join(text)}}}"
