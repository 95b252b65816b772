"""Functions by reference: `"module:name"` in a file, the function itself in Python."""

from __future__ import annotations

import importlib
from typing import Any

from fnaccel.errors import ConfigError, NotSerializableError


def load(reference: Any, where: str) -> Any:
    """The object that `"module:name"` names; anything that is no string as it is.

    Raises:
        ConfigError: no such module or name.
    """
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{reference!r} names nothing that can be imported: {error}",
            where=where,
            fix='write "module:name" of a function at the top of a module on the path',
        ) from error
    return found


def dump(value: Any, where: str) -> Any:
    """`"module:name"` of a function that can be found again by it; anything else as it is.

    Raises:
        NotSerializableError: a lambda, a closure, or a function of `__main__`.
    """
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name or module == "__main__":
        kind = (
            "a lambda"
            if name and "<lambda>" in name
            else "a closure"
            if name and "<locals>" in name
            else "defined in the script"
        )
        raise NotSerializableError(
            f"{name or value!r} is {kind}, so no file can name it",
            where=where,
            fix='move it to the top of an importable module, and refer to it as "module:name"',
        )
    return f"{module}:{name}"
