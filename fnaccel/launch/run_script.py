"""Running a file or a module as `python` does: it *is* `__main__`, until the interpreter ends.

`runpy` puts the old `__main__` back when the code returns. Threads and exit handlers of the script that
still run would then look for their classes in the launcher.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fnaccel.errors import LaunchError


def run_file(path: str, args: Sequence[str]) -> None:
    """Run a Python file as `__main__`.

    Args:
        path: the file. Its folder comes first on `sys.path`.
        args: `sys.argv` after the script's name.
    """
    full = os.path.abspath(path)  # noqa: PTH100 - `python` keeps symlinks in __file__
    _first_on_path(str(Path(full).resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    code = loader.source_to_code(loader.get_data(full), full)  # get_code would write a .pyc
    _run_as_main(code, [path, *args], file=full, loader=loader, spec=None, package=None)


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module, or a package's `__main__`, as `python -m` does.

    Args:
        name: dotted. The working folder comes first on `sys.path`.
        args: `sys.argv` after the module's file.

    Raises:
        LaunchError: there is none of that name, or it has no code.
    """
    _first_on_path(os.getcwd())  # noqa: PTH109 - an entry of sys.path is text
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise LaunchError(
            f"{name!r} is no module that can be run",
            where=f"fnaccel launch -m {name}",
            fix="name a module with code, or a package with a __main__.py, from the folder it is in",
        )
    argv = [spec.origin or name, *args]
    _run_as_main(code, argv, file=spec.origin, loader=loader, spec=spec, package=spec.parent)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise  # the package was found, and imports something that was not


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_as_main(
    code: CodeType, argv: list[str], *, file: str | None, loader: object, spec: Any, package: str | None
) -> None:
    sys.argv = argv
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=file, __loader__=loader, __spec__=spec, __package__=package, __cached__=None,
        __builtins__=__builtins__,
    )  # fmt: skip
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
