"""YAML and JSON that somebody else wrote, as plain values: bounded in size and depth, without aliases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

Repeated = Callable[[str, Any, Any], None]
"""Called with a key that a mapping has twice, its earlier value and its later one."""
LONGEST = 1 << 20
"""Characters of a text."""
DEEPEST = 50
"""Mappings and lists inside of each other."""
_DIGITS = 10**100


class _Loader(yaml.SafeLoader):
    """yaml's own loader takes the last of two equal keys, and follows aliases, which can make cycles."""

    repeated: Repeated | None = None
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"an alias (*name) stands in line {mark.line + 1}: write the value itself")
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"values are nested in more than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if re.fullmatch(r"[-+]?0\d+", str(node.value)):
            where = f"line {node.start_mark.line + 1}"
            raise yaml.YAMLError(f"{where} has {node.value}, an octal number in YAML: write it without the 0")
        return super().construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                if self.repeated is None:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"two keys {key.value!r}", key.start_mark
                    )
                earlier, later = (self.construct_object(each, deep=True) for each in (seen[key.value], value))
                self.repeated(key.value, earlier, later)
            seen[str(key.value)] = value
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str, repeated: Repeated | None = None) -> Any:
    """Plain values of YAML text. No text at all is a mapping without keys.

    Args:
        text: the YAML.
        repeated: called with each key that a mapping has twice, and with its two values. The last one is
            taken then. By default such a key is an error.

    Raises:
        yaml.YAMLError: the text is not YAML, is too long or too deep, holds an alias, or a key twice.
    """
    try:
        check_length(text)
        loader = _Loader(text)
        loader.repeated = repeated
        plain = check_plain(loader.get_single_data())
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("values are nested too deeply") from None
    except Exception as error:  # yaml's own constructors raise several kinds for a wrong date, set or number
        raise yaml.YAMLError(f"a value can't be read: {error}") from None
    return {} if plain is None else plain


def load_json(text: str | bytes, repeated: Repeated | None = None, longest: int = LONGEST) -> Any:
    """Plain values of JSON text.

    Args:
        text: the JSON.
        repeated: as in `load_yaml`.
        longest: the most characters of the text.

    Raises:
        ValueError: the text is not JSON, is too long or too deep, or an object has a key twice.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name, value in items:
            if name in plain:
                if repeated is None:
                    raise ValueError(f"two keys {name!r}")
                repeated(name, plain[name], value)
            plain[name] = value
        return plain

    try:
        check_length(text, longest)
        return check_plain(json.loads(text, object_pairs_hook=pairs))
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def check_length(text: str | bytes, longest: int = LONGEST) -> None:
    """Raise ValueError for a text that is too long."""
    if len(text) > longest:
        raise ValueError(f"the text has {len(text):,} characters, and {longest:,} are the limit")


def check_plain(value: Any, depth: int = 0) -> Any:
    """Return the value.

    Raises:
        ValueError: it is nested too deeply, a number has more than 100 digits, or a text holds half of a
            surrogate pair, which can't be written.
    """
    if depth > DEEPEST:
        raise ValueError(f"values are nested in more than {DEEPEST} levels")
    if isinstance(value, int) and abs(value) >= _DIGITS:
        raise ValueError("a number has more than 100 digits")
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"the text {ascii(value)[:60]} holds half of a surrogate pair")
    if isinstance(value, dict):
        for key, each in value.items():
            check_plain(key, depth + 1)
            check_plain(each, depth + 1)
    elif isinstance(value, list | tuple | set):
        for each in value:
            check_plain(each, depth + 1)
    return value
