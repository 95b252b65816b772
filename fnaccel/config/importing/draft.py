"""The table of an import and the fields of the recipe, while the keys of a document are read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs

from fnaccel.config.recipes import Recipe
from fnaccel.config.yaml import override
from fnaccel.errors import ConfigError, nearest

NOTHING = "nothing"
"""What a key becomes if a recipe has no place for it."""


@attrs.frozen
class Row:
    """One key of an imported document.

    Attributes:
        key: the dotted key in the document.
        value: its value there.
        became: the field of the recipe with its value, or `"nothing"`.
        why: the reason, or what the field means.

    Example:
        >>> row = fa.config.import_document({"num_processes": 2, "use_cpu": True}).rows[1]
        >>> row.key, row.value, row.became
        ('use_cpu', True, 'launch.cpu: True')
    """

    key: str
    value: Any
    became: str
    why: str


@attrs.frozen
class Imported:
    """The result of an import.

    Attributes:
        recipe: the recipe.
        rows: one row for each key of the document that has no keys below it, in its order.
        fields: the dotted fields that the document sets, also if they have their default value.
        notes: values that hold without a key, such as defaults of the other tool.

    Example:
        >>> imported = fa.config.import_document({"num_processes": 2, "use_cpu": True})
        >>> imported.recipe.launch.ranks, imported.recipe.strategy
        (2, 'ddp')
        >>> imported.rows[0].became
        'launch.ranks: 2'
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    fields: dict[str, Any]
    notes: tuple[str, ...] = ()


def leaves_of(document: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The dotted keys and values of a nested mapping. An empty mapping is a value.

    Example:
        >>> leaves_of({"a": {"b": 1, "c": {}}})
        {'a.b': 1, 'a.c': {}}
    """
    leaves: dict[str, Any] = {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            leaves |= leaves_of(cast(Mapping[Any, Any], value), f"{key}.")
        else:
            leaves[key] = value
    return leaves


class Draft:
    """Rows and fields so far. Each key gets one row, and two keys may not set a field to different values.

    Args:
        leaves: the dotted keys and values of the document.
        tool: the name of the tool that the document is for.
    """

    def __init__(self, leaves: Mapping[str, Any], tool: str) -> None:
        self.leaves = dict(leaves)
        self.tool = tool
        self.fields: dict[str, Any] = {}
        self.notes: list[str] = []
        self._rows: dict[str, Row] = {}
        self._sources: dict[str, str] = {}

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key. `default` if the key is absent or null."""
        value = self.leaves.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the document has the key and no row was written for it."""
        return key in self.leaves and key not in self._rows

    def below(self, section: str) -> list[str]:
        """The keys of a section that have no row yet."""
        return [key for key in self.leaves if key.startswith(f"{section}.") and key not in self._rows]

    def set(self, key: str, field: str, value: object, why: str) -> None:
        """Set a field of the recipe from a key, and write the row of the key.

        Raises:
            ConfigError: another key has set the field to another value.
        """
        self.fill(field, value, key)
        self.row(key, f"{field}: {value}", why)

    def fill(self, field: str, value: object, source: str) -> None:
        """Set a field of the recipe without a row.

        Raises:
            ConfigError: another key has set the field to another value.
        """
        if field in self.fields and self.fields[field] != value:
            earlier = self._sources[field]
            raise ConfigError(
                f"{earlier} and {source} contradict each other: {field} would be "
                f"{self.fields[field]!r} and {value!r}",
                where=f"{self.tool}: {source}",
                fix=f"remove one of the two, {earlier} or {source}",
            )
        self.fields[field] = value
        self._sources.setdefault(field, source)

    def row(self, key: str, became: str, why: str) -> None:
        """Write the row of a key that the document has. A later row replaces an earlier one."""
        if key in self.leaves:
            self._rows[key] = Row(key, self.leaves[key], became, why)

    def skip(self, key: str, why: str) -> None:
        """Write the row of a key that has no meaning in a recipe, and the reason."""
        self.row(key, NOTHING, why)

    def skip_all(self, keys: Iterable[str], why: str) -> None:
        """As `skip`, for the keys without a row."""
        for key in keys:
            if self.has(key):
                self.skip(key, why)

    def wrong(self, key: str, what: str, fix: str) -> ConfigError:
        """The error for a value that can't be imported."""
        return ConfigError(f"{key}: {self.leaves.get(key)!r}: {what}", where=f"{self.tool}: {key}", fix=fix)

    def truth(self, key: str, *, default: bool = False) -> bool:
        """A value that is true or false, in one of its spellings: `yes`, `'no'`, `'True'`, 0.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(key, default)
        text = str(value).strip().lower()
        if text in ("true", "yes", "y", "1", "on"):
            return True
        if text in ("false", "no", "n", "0", "off", "none", ""):
            return False
        raise self.wrong(key, "this is neither true nor false", "write true or false")

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number, also if it is written as text.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key, default)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.wrong(key, "this is no number", "write a whole number") from None
        if isinstance(value, bool) or not number.is_integer():
            raise self.wrong(key, "this is no whole number", "write a whole number")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float:
        """A number, also if it is written as text.

        Raises:
            ConfigError: it is none.
        """
        value: Any = self.get(key, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.wrong(key, "this is no number", "write a number") from None

    def names(self, key: str) -> list[str]:
        """A list of texts, or one text with commas. `None` in it counts as absent.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(key, [])
        if not isinstance(value, str | list | tuple):
            raise self.wrong(key, "this is no list of names", "write [a, b], or text: a,b")
        parts = value.split(",") if isinstance(value, str) else [str(part) for part in value]
        return [part.strip() for part in parts if part.strip().lower() not in ("", "none", "null")]

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """The entry of a table for a name, in any case.

        YAML reads NO without quotes as false. It is the entry `no` again, in the row of the key too.

        Raises:
            ConfigError: the table has no such name. Names the nearest.
        """
        written = self.get(key, default)
        name = "no" if written is False else str(written).strip()
        for entry, value in choices.items():
            if entry.lower() == name.lower():
                if written is False:
                    self.leaves[key] = entry
                return value
        raise self.wrong(key, "there is no such name", nearest(name, choices))

    def finish(self, keys: Iterable[str]) -> Imported:
        """The recipe and the rows. A key without a row is unknown.

        Args:
            keys: dotted keys of the tool, for the nearest name.

        Raises:
            ConfigError: the values make no recipe.
        """
        names = set(keys)
        for key in self.leaves:
            if key not in self._rows:
                self.skip(key, f"unknown: {self.tool} has no such key as far as we know. {_near(key, names)}")
        recipe = override(Recipe(), self.fields, f"the import of {self.tool}")
        return Imported(
            recipe, tuple(self._rows[key] for key in self.leaves), dict(self.fields), tuple(self.notes)
        )


def _near(key: str, names: set[str]) -> str:
    hint = nearest(key, names)
    return hint.split(" known: ")[0] if hint.startswith("did you mean") else "No key has a similar name"
