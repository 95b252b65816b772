"""One DeepSpeed configuration out of several sources: the file, the strategy's arguments, the step.

A value that the file leaves out or calls `"auto"` is filled in. If two sources give the same value, it is
accepted. If they give different values, an error names both values and both sources.
"""

from __future__ import annotations

import copy
from typing import Any

from fnaccel.errors import ConfigError
from fnaccel.tree import Tree

AUTO = "auto"


class Draft:
    """A configuration that is being completed.

    Args:
        written: the contents of the file, or of the dictionary given in its place.
        origin: its name in error messages.
    """

    def __init__(self, written: dict[str, Any], origin: str) -> None:
        self.origin = origin
        self._config = copy.deepcopy(written)
        self._problems: list[str] = []
        self._filled: dict[str, str] = {}

    def written(self, key: str) -> Any:
        """The value at a dotted key. None if there is no value, or if it is `"auto"`."""
        value = self._find(key)
        return None if value == AUTO else value

    def is_auto(self, key: str) -> bool:
        """Whether the value is `"auto"`."""
        return self._find(key) == AUTO

    def say(self, key: str, value: Tree, origin: str) -> None:
        """Set a value that a source chose. Note a problem if another source chose a different value."""
        present = self.written(key)
        if present is None:
            self._put(key, value)
            self._filled[key] = origin
        elif present != value:
            there = self._filled.get(key, self.origin)
            self._problems.append(f"{key} is {present!r} in {there}, and {value!r} in {origin}")

    def fill(self, key: str, value: Tree) -> None:
        """Set a default if no source chose a value."""
        if self.written(key) is None:
            self._put(key, value)

    def resolve(self, key: str, value: Tree) -> None:
        """Set a value only if the file says `"auto"`."""
        if self.is_auto(key):
            self._put(key, value)

    def drop(self, key: str) -> None:
        """Remove a key that is left to DeepSpeed."""
        section, _, last = key.rpartition(".")
        inside = self._find(section) if section else self._config
        if isinstance(inside, dict):
            inside.pop(last, None)

    def object_to(self, problem: str) -> None:
        """Note another problem."""
        self._problems.append(problem)

    def check(self, where: str) -> None:
        """Raise one ConfigError with every disagreement if sources disagree."""
        if self._problems:
            raise ConfigError(
                f"the DeepSpeed configuration contradicts itself: {'; '.join(self._problems)}",
                where=where,
                fix='say it in one place: write "auto" in the file (or leave it out), or remove the other',
            )

    def finish(self, where: str) -> dict[str, Any]:
        """The configuration, complete.

        Raises:
            ConfigError: sources disagree, or an `"auto"` is left that nothing here fills.
        """
        self.check(where)
        left = sorted(_autos(self._config))
        if left:
            raise ConfigError(
                f'nothing here fills "auto" for {", ".join(left)}',
                where=f"{where}, {self.origin}",
                fix="write the values out",
            )
        return self._config

    def _find(self, key: str) -> Any:
        inside: Any = self._config
        for name in key.split("."):
            if not isinstance(inside, dict) or name not in inside:
                return None
            inside = inside[name]
        return inside

    def _put(self, key: str, value: Tree) -> None:
        *path, last = key.split(".")
        inside = self._config
        for name in path:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ConfigError(
                    f"{name} holds {inside!r}, not a section with {last!r} in it",
                    where=self.origin,
                    fix=f'write {{"{name}": {{"{last}": ...}}}}',
                )
        inside[last] = value


def _autos(value: Tree, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {
            key_path
            for key, child in value.items()
            for key_path in _autos(child, f"{path}.{key}" if path else key)
        }
    return {path} if value == AUTO else set()
