"""`fnaccel config update`: writes a file with the current names of keys. Comments stay."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from fnaccel.cli.options import config as options_of
from fnaccel.cli.terminal import print_json
from fnaccel.config.renaming import renamed
from fnaccel.world.paths import replace_file

_COMMAND = "fnaccel config update"


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
    parsed = options_of.update().parse_args(arguments)
    path: Path = parsed.file
    before, after = renamed(path)
    changes = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="")
    if parsed.json:
        print_json({"recipe": str(path), "changes": list(changes)})
    else:
        print("\n".join(changes) if before != after else f"{path} is up to date")
    if before == after:
        return 0
    if parsed.check:
        return 1
    replace_file(path, after, _COMMAND)
    if not parsed.json:
        print(f"wrote {path}")
    return 0
