"""The floor plan of the package, and its figures: `python -m tests.surface.structure` prints them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import fnaccel

PACKAGE = Path(fnaccel.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))
LOOSE = {"__init__", "__main__", "errors", "state", "_torch", "_lazy", "texts", "random"}
"""The modules that may stand in the root."""

ROWS = [
    "errors tree _torch _lazy texts",
    "world random",
    "step collectives",
    "models losses track launch",
    "state optim transforms seeing",
    "data",
    "engine",
    "strategies",
    "program",
    "checkpoint",
    "interchange testing",
    "loop",
    "big config",
    "estimate",
    "cli",
    "extend",
]
"""Rooms, bottom first. A room imports rooms of rows below, and none of its own row."""

ROW = {room: number for number, row in enumerate(ROWS) for room in row.split()}
CORE = {"step", "engine", "strategies", "program", "state"}


def name_of(path):
    """A module's dotted name below the package; `""` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name):
    return name.split(".")[0]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def for_types(path):
    """The imports of a file that stand under `if TYPE_CHECKING` without an `else`: its annotations need them."""
    blocks = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.If) and not node.orelse]
    only = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    return {node for block in only for node in ast.walk(block) if isinstance(node, ast.ImportFrom)}


def imports(path):
    """(module, names) of each import that a file carries out, those inside of functions included."""
    left_out = for_types(path)
    for node in ast.walk(tree_of(path)):
        if node in left_out:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


@functools.cache
def defined_in():
    """The module of each name of `fnaccel.extend`, which shows what others define."""
    return {name: module for module, names in imports(PACKAGE / "extend" / "__init__.py") for name in names}


@functools.cache
def edges():
    """Which modules each module imports, by name. A name of `fnaccel.extend` counts as its own module's."""
    known = {name_of(path) for path in FILES}
    found = {}
    for path in FILES:
        targets = found[name_of(path)] = set()
        for module, names in imports(path):
            first, _, base = module.partition(".")
            if module == "fnaccel.extend":
                targets |= {defined_in()[name].partition(".")[2] for name in names}
            elif first == "fnaccel":
                full = [f"{base}.{name}".lstrip(".") for name in names]
                targets |= {name if name in known else base for name in full} or {base}
    return found


def circles():
    """Sets of modules that import each other, directly or through others."""
    found, index, low, stack = [], {}, {}, []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges().get(name, ()):
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for name in edges():
        if name not in ("", "extend", *index):  # the package and `extend` show what others define
            visit(name)
    return found


def room_imports():
    """Pairs of rooms of which the first imports the second."""
    pairs = {(room_of(name), room_of(target)) for name, targets in edges().items() for target in targets}
    return {
        (mine, theirs)
        for mine, theirs in pairs
        if mine and theirs and mine != theirs and "extend" not in (mine, theirs)
    }


def look_ups_by_class():
    """Calls of `.find(SomeRecord)`, by file."""
    return [
        (name_of(path), ast.unparse(node))
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "find"
        if any(re.match(r"(\w+\.)?[A-Z]\w+$", ast.unparse(argument)) for argument in node.args)
    ]


def bare_any(rooms=None):
    """(parameters that are annotated `Any`, all annotated parameters)."""
    taken = [path for path in FILES if rooms is None or room_of(name_of(path)) in rooms]
    notes = [
        ast.unparse(arg.annotation)
        for path in taken
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if arg.annotation is not None
    ]
    return notes.count("Any"), len(notes)


def main():
    loose = {name_of(path) or "__init__" for path in FILES if path.parent == PACKAGE}
    rooms = {room_of(name_of(path)) for path in FILES} - {""}
    figures = {
        "modules in the root": len(loose),
        "rooms (root modules and folders)": len(rooms),
        "rows of the import order": len(ROWS),
        "imports between rooms": len(room_imports()),
        "circles of files": len(circles()),
        "imports for types only": sum(len(for_types(path)) for path in FILES),
        "look-ups of a record by class": len(look_ups_by_class()),
        "lines": sum(len(path.read_text().splitlines()) for path in FILES),
        "files": len(FILES),
        "public names": len([name for name in dir(fnaccel) if not name.startswith("_")]),
    }
    for what, where in (("all", None), ("core path", CORE)):
        bare, count = bare_any(where)
        figures[f"bare Any among parameters, {what}"] = f"{bare} of {count}, {100 * bare / count:.1f} %"
    for what, figure in figures.items():
        print(f"{what:45} {figure}")


if __name__ == "__main__":
    main()
