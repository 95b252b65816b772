"""The table of an import and the fields of the recipe, while the keys of a document are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from fnaccel.config.recipes import Recipe
from fnaccel.config.yaml import override
from fnaccel.errors import ConfigError, nearest

NOTHING = "nothing"
"""What a key becomes if a recipe has no place for it."""
DEFAULT = "it is the default"
MICRO_BATCHES = "each batch is cut into so many micro-batches. Accelerate took so many batches: data.window"


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


def tree_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping of dotted keys and values.

    Example:
        >>> tree_of({"a.b": 1, "a.c": {}})
        {'a': {'b': 1, 'c': {}}}
    """
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, last = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


def call(name: str, *arguments: Any, **options: Any) -> str:
    """The text of one axis of a strategy.

    Example:
        >>> call("fsdp", 2, offload=True, units=None)
        'fsdp(2, offload=True, units=None)'
        >>> call("ddp")
        'ddp'
    """
    words = [repr(argument) for argument in arguments]
    words += [f"{key}={value!r}" for key, value in options.items()]
    return f"{name}({', '.join(words)})" if words else name


Table = Mapping[str, tuple[str, "Callable[[Draft, str], Any]", str]]
"""Keys: the field of a recipe or the option of a strategy (`fsdp.offload`), how the value of the key is read
(None: it sets nothing), and the reason in its row."""


class Draft:
    """Rows and fields so far. The first row of a key stays, and no two keys set a field to different values.

    Args:
        leaves: the dotted keys and values of the document.
        tool: the name of the tool that the document is for.
    """

    def __init__(self, leaves: Mapping[str, Any], tool: str) -> None:
        self.leaves = dict(leaves)
        self.tool = tool
        self.fields: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self._rows: dict[str, Row] = {}
        self._sources: dict[str, str] = {}

    def read(self, table: Table, section: str = "", prefix: str = "") -> None:
        """Set the fields of a table from the keys of a section, whose names may have a prefix."""
        for name, (field, read, why) in table.items():
            key = self.key(section, name, prefix)
            value = read(self, key)
            if value is not None:
                self.set(key, field, value, why)

    def reasons(self, reasons: Mapping[str, str], section: str = "", prefix: str = "") -> None:
        """Write the rows of keys that have set nothing: the reason of each."""
        for name, why in reasons.items():
            self.skip(why, self.key(section, name, prefix))

    def key(self, section: str, name: str, prefix: str = "") -> str:
        """The dotted key of a name, with the prefix if the document has it."""
        start = f"{section}." if section else ""
        long = f"{start}{prefix}{name}"
        return long if long in self.leaves else f"{start}{name}"

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key. `default` if the key is absent or null."""
        value = self.leaves.get(key)
        return default if value is None else value

    def below(self, section: str) -> list[str]:
        """The keys of a section that have no row yet."""
        return [key for key in self.leaves if key.startswith(f"{section}.") and key not in self._rows]

    def set(self, key: str, field: str, value: object, why: str) -> None:
        """Set a field of the recipe or an option of the strategy, and write the row of the key.

        Raises:
            ConfigError: another key has set the field to another value.
        """
        strategy, _, option = field.partition(".")
        if strategy in ("fsdp", "deepspeed"):
            self.options[option] = value
            self.row(key, f"strategy: {call(strategy, **{option: value})}", why)
        else:
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
        """Write the row of a key, if the document has the key and no row was written for it."""
        if key in self.leaves:
            self._rows.setdefault(key, Row(key, self.leaves[key], became, why))

    def skip(self, why: str, *keys: str) -> None:
        """Write the rows of keys that have no meaning in a recipe, and the reason."""
        for key in keys:
            self.row(key, NOTHING, why)

    def wrong(self, key: str, what: str, fix: str) -> ConfigError:
        """The error for a value that can't be imported."""
        return ConfigError(f"{key}: {self.leaves.get(key)!r}: {what}", where=f"{self.tool}: {key}", fix=fix)

    def truth(self, key: str) -> bool | None:
        """A value that is true or false, in one of its spellings: `yes`, `'no'`, `'True'`, 0.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(key)
        text = str(value).strip().lower()
        if text in ("true", "yes", "y", "1", "on"):
            return True
        if text in ("false", "no", "n", "0", "off", "none", ""):
            return None if value is None else False
        raise self.wrong(key, "this is neither true nor false", "write true or false")

    def flag(self, key: str) -> bool | None:
        """True, or None if the value is false or absent."""
        return self.truth(key) or None

    def one(self, key: str) -> int | None:
        """1 for a value that is true."""
        return 1 if self.truth(key) else None

    def filled(self, key: str) -> Any:
        """A value, or None if it is empty, zero or false."""
        return self.get(key) or None

    def text(self, key: str) -> str | None:
        """A value as text."""
        value = self.get(key)
        return None if value is None else str(value)

    def whole(self, key: str) -> int | None:
        """A whole number, also if it is written as text.

        Raises:
            ConfigError: it is none.
        """
        number = self.number(key, "write a whole number")
        if number is None:
            return None
        if isinstance(self.leaves[key], bool) or not number.is_integer():
            raise self.wrong(key, "this is no whole number", "write a whole number")
        return int(number)

    def number(self, key: str, fix: str = "write a number") -> float | None:
        """A number, also if it is written as text.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise self.wrong(key, "this is no number", fix) from None

    def step(self, count: str, norm: str, why: str) -> None:
        """Set the micro-batches of a step and the bound of its norm, unless the keys leave them open."""
        if str(self.get(count)).lower() not in ("auto", "none"):
            self.set(count, "accumulate", self.whole(count), why)
        if str(self.get(norm)).lower() not in ("auto", "none"):
            bound = self.number(norm) or None
            self.set(norm, "clip_norm", bound, "the norm over all ranks. 0: no bound")

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
        for key in self.leaves.keys() - self._rows.keys():
            self.skip(f"unknown: {self.tool} has no such key as far as we know. {_near(key, names)}", key)
        recipe = override(Recipe(), self.fields, f"the import of {self.tool}")
        return Imported(recipe, tuple(self._rows[key] for key in self.leaves), dict(self.fields))


def _near(key: str, names: set[str]) -> str:
    hint = nearest(key, names)
    return hint.split(" known: ")[0] if hint.startswith("did you mean") else "No key has a similar name"
