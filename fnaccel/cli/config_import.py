"""`fnaccel config import`: a file of another tool as a recipe, and what became of each of its keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from fnaccel.cli.config_default import write_recipe
from fnaccel.cli.terminal import Parser, columns
from fnaccel.config.importing import Imported, Row, commented, import_file

_COMMAND = "fnaccel config import"
_HELP = """Import a file of Accelerate (YAML), DeepSpeed (JSON) or torchtitan (TOML) as a recipe.

Prints what became of each key, and the recipe. Then: fnaccel launch --config RECIPE train.py"""


def parser() -> Parser:
    """The options of `fnaccel config import`."""
    options = Parser(_COMMAND, _HELP)
    options.add_argument("file", metavar="FILE")
    options.add_argument("-o", "--output", metavar="RECIPE", help="write the recipe here. A file is kept")
    options.add_argument("--deepspeed", metavar="FILE", help="the DeepSpeed file that FILE names")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options


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
    parsed = parser().parse_args(arguments)
    deepspeed = None if parsed.deepspeed is None else Path(parsed.deepspeed)
    imported = import_file(Path(parsed.file), deepspeed)
    recipe = commented(imported, parsed.file)
    if parsed.output is not None:
        write_recipe(Path(parsed.output), recipe, _COMMAND)
    if parsed.json:
        print(json.dumps(_as_json(imported, recipe), default=str))
        return 0
    print(table(imported.rows))
    print(f"\n{recipe}", end="")
    if parsed.output is not None:
        flag = "" if parsed.output == "fnaccel.yaml" else f"--config {parsed.output} "
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
        "notes": list(imported.notes),
        "recipe": yaml.safe_load(recipe),
    }
