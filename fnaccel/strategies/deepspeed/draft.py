"""One DeepSpeed configuration out of several voices: the file, the strategy's arguments, the step.

What the file leaves out or calls `"auto"` is filled, what two of them say alike is accepted, and what
they say differently raises with both values and where each came from.
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
        written: the file's contents, or what stood in its place.
        origin: what to call it in messages.
    """

    def __init__(self, written: dict[str, Any], origin: str) -> None:
        self.origin = origin
        self._config = copy.deepcopy(written)
        self._problems: list[str] = []
        self._filled: dict[str, str] = {}

    def written(self, key: str) -> Any:
        """What stands at a dotted key; None where nothing does, or where it is `"auto"`."""
        value = self._find(key)
        return None if value == AUTO else value

    def is_section(self, key: str) -> bool:
        """Whether a section stands there."""
        return isinstance(self._find(key), dict)

    def is_auto(self, key: str) -> bool:
        """Whether the file leaves a value to be found."""
        return self._find(key) == AUTO

    def say(self, key: str, value: Tree, origin: str) -> None:
        """Put a value that somebody chose; note it where something else stands there."""
        known = self.written(key)
        if known is None:
            self._put(key, value)
            self._filled[key] = origin
        elif known != value:
            there = self._filled.get(key, self.origin)
            self._problems.append(f"{key} is {known!r} in {there}, and {value!r} in {origin}")

    def fill(self, key: str, value: Tree) -> None:
        """Put a default where nobody chose."""
        if self.written(key) is None:
            self._put(key, value)

    def resolve(self, key: str, value: Tree) -> None:
        """Put a value where the file says `"auto"`, and only there."""
        if self.is_auto(key):
            self._put(key, value)

    def drop(self, key: str) -> None:
        """Remove what is left to DeepSpeed."""
        *path, last = key.split(".")
        inside: Any = self._config
        for name in path:
            inside = inside.get(name) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside.pop(last, None)

    def object_to(self, problem: str) -> None:
        """Note something else that can't be."""
        self._problems.append(problem)

    def check(self, where: str) -> None:
        """Raise ConfigError where voices disagree: every disagreement at once."""
        if self._problems:
            raise ConfigError(
                f"the DeepSpeed configuration contradicts itself: {'; '.join(self._problems)}",
                where=where,
                fix='say it in one place: write "auto" in the file (or leave it out), or remove the other',
            )

    def finish(self, where: str) -> dict[str, Any]:
        """The configuration, complete.

        Raises:
            ConfigError: voices disagree, or an `"auto"` is left that nothing here fills.
        """
        self.check(where)
        left = sorted(_autos(self._config))
        if left:
            raise ConfigError(
                f'nothing here knows what "auto" is for {", ".join(left)}',
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
            found for key, one in value.items() for found in _autos(one, f"{path}.{key}" if path else key)
        }
    return {path} if value == AUTO else set()
