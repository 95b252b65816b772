"""`fnaccel config update`: writes a file with the current names of keys. Comments stay."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from fnaccel.cli.terminal import Parser
from fnaccel.config.renaming import renamed

_COMMAND = "fnaccel config update"


def parser() -> Parser:
    """The options of `fnaccel config update`."""
    options = Parser(_COMMAND, "Write a recipe with the current names of its keys. Shows what changes.")
    options.add_argument("file", metavar="FILE")
    options.add_argument("--check", action="store_true", help="show what would change, and write nothing")
    return options


def run(arguments: Sequence[str]) -> int:
    """Update a file.

    Returns:
        0. With `--check`: 1 if the file is not up to date.

    Raises:
        ConfigError: there is no such file, it is a file of another tool, or it is no recipe.

    Example:
        >>> Path("r.yaml").write_text("strategy: ddp  # two copies")
        >>> run(["r.yaml"])
        r.yaml is up to date
        0
    """
    parsed = parser().parse_args(arguments)
    path = Path(parsed.file)
    before, after = renamed(path)
    if before == after:
        print(f"{path} is up to date")
        return 0
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="")
    print("\n".join(lines))
    if parsed.check:
        return 1
    # beside the file, and then in its place: no reader sees half a file
    part = path.with_name(f"{path.name}.part")
    part.write_text(after, encoding="utf-8")
    part.replace(path)
    print(f"wrote {path}")
    return 0
