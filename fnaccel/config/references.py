"""Functions by reference: `"module:name"` in a file, the function itself in Python."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fnaccel.errors import ConfigError, NotSerializableError


def load(reference: object, where: str) -> Any:
    """Load the object of `"module:name"` or `"path/to/file.py:name"`. If no string, the value itself.

    A file is imported as the module of its name, its folder first on the path, as `python` does.

    Raises:
        ConfigError: no such module or name.
    """
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.rpartition(":")  # the last one: a path may hold others
    if not module:
        module, name = name, ""
    try:
        if not name:
            raise ValueError("no name follows the module")
        target: Any = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{reference!r} names nothing that can be imported: {error}",
            where=where,
            fix='write "module:name" of a function at the top of a module on the path, or "file.py:name"',
        ) from error
    return target


def _from_file(path: Path) -> Any:
    file = path.resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {path}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    if Path(str(getattr(module, "__file__", ""))).resolve() != file:
        raise ImportError(f"another module is called {file.stem!r}")
    return module


def dump(value: Any, where: str) -> Any:
    """`"module:name"` of a function, if it can be loaded again by it. Otherwise the value itself.

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
