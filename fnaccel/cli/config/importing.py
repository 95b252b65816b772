"""`fnaccel config import`: a file of another tool as a recipe, and what became of each of its keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from fnaccel.cli.config.default import write_recipe
from fnaccel.cli.options import config as options_of
from fnaccel.cli.terminal import columns, print_json
from fnaccel.config.importing import Imported, Row, commented, import_file

_COMMAND = "fnaccel config import"


def run(arguments: Sequence[str]) -> int:
    """Import a file, print the table and the recipe, and write it if `-o` is given.

    Raises:
        ConfigError: the file can't be imported, or the file to write exists.

    Example:
        >>> Path("a.yaml").write_text("distributed_type: MULTI_CPU\\nnum_processes: 2")
        >>> run(["a.yaml", "-o", "fnaccel.yaml"])
        key               value      in the recipe      why
        distributed_type  MULTI_CPU  strategy: ddp      processes on CPUs
        num_processes     2          launch.ranks: 2    ...
        <BLANKLINE>
        # imported from a.yaml
        strategy: ddp
        launch:
        ...
        0
    """
    parsed = options_of.import_file().parse_args(arguments)
    imported = import_file(parsed.file, parsed.deepspeed)
    recipe = commented(imported, str(parsed.file))
    if parsed.output is not None:
        write_recipe(parsed.output, recipe, _COMMAND)
    if parsed.json:
        print_json(_as_json(imported, recipe))
        return 0
    print(table(imported.rows))
    print(f"\n{recipe}", end="")
    if parsed.output is not None:
        flag = "" if parsed.output == Path(options_of.DEFAULT_FILE) else f"--config {parsed.output} "
        print(f"\nwrote {parsed.output}. Start it with:\n  fnaccel launch {flag}train.py")
    return 0


def table(rows: Sequence[Row]) -> str:
    """The rows in columns."""
    lines = [(row.key, _short(row.value), row.became, row.why) for row in rows]
    return columns([("key", "value", "in the recipe", "why"), *lines], "<<<")


def _short(value: Any, width: int = 30) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _as_json(imported: Imported, recipe: str) -> dict[str, Any]:
    return {
        "rows": [attrs.asdict(row) for row in imported.rows],
        "recipe": yaml.safe_load(recipe),
    }
