"""The options of `fnaccel config` and of its actions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fnaccel.cli.options.launch import add_recipe_options
from fnaccel.cli.terminal import Parser
from fnaccel.errors import install_line

DEFAULT_FILE = "fnaccel.yaml"
"""The recipe in the current folder that is used without `--config`."""
_HELP = """Ask questions and write a recipe, or one of these actions:

  ask       ask questions, and write ./fnaccel.yaml from the answers (--answers FILE for scripts)
  import    a file of Accelerate or DeepSpeed as a recipe, key by key
  show      each value of the recipe that a launch would use, and its source
  validate  check a file: keys, kinds, names, and the values of the job
  update    bring a file of an older version up to date
  default   write ./fnaccel.yaml for this machine. A file that exists is kept"""


def parser() -> Parser:
    """The options of `fnaccel config` without an action."""
    return Parser("fnaccel config", _HELP, f"fnaccel config [{' | '.join(ACTIONS)}] ...")


def ask() -> Parser:
    """The options of `fnaccel config ask`."""
    options = _action(
        "ask",
        f"""Ask questions, and write ./{DEFAULT_FILE} from the answers.

Only what matters after the earlier answers is asked. Enter takes the default. Ctrl-C writes nothing.
With questionary ({install_line("cli")}) choices are made with the arrow keys.""",
    )
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: ./{DEFAULT_FILE}")
    options.add_argument(
        "--answers", type=Path, metavar="FILE",
        help="YAML with the answer to each question by its name. Defaults answer the others",
    )  # fmt: skip
    options.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    return options


def import_file() -> Parser:
    """The options of `fnaccel config import`."""
    options = _action(
        "import",
        """A file of Accelerate (YAML) or DeepSpeed (JSON) as a recipe.

Prints what became of each key, and the recipe. Then: fnaccel launch --config RECIPE train.py""",
    )
    options.add_argument("file", type=Path, metavar="FILE")
    options.add_argument(
        "-o", "--output", type=Path, metavar="RECIPE", help="write the recipe here. A file is kept"
    )
    options.add_argument("--deepspeed", type=Path, metavar="FILE", help="the DeepSpeed file that FILE names")
    return options


def show() -> Parser:
    """The options of `fnaccel config show`."""
    options = _action("show", "Each value of the recipe, and its source.")
    add_recipe_options(options)
    return options


def validate() -> Parser:
    """The options of `fnaccel config validate`."""
    options = _action("validate", "Check a recipe, without a model and without data.")
    options.add_argument("file", type=Path, metavar="FILE")
    return options


def update() -> Parser:
    """The options of `fnaccel config update`."""
    options = _action("update", "Write a recipe with the current names of its keys. Shows what changes.")
    options.add_argument("file", type=Path, metavar="FILE")
    options.add_argument("--check", action="store_true", help="show what would change, and write nothing")
    return options


def default() -> Parser:
    """The options of `fnaccel config default`."""
    return _action("default", f"Write ./{DEFAULT_FILE} for this machine.")


def _action(name: str, description: str) -> Parser:
    options = Parser(f"fnaccel config {name}", description)
    options.add_argument("--json", action="store_true", help="print JSON")
    return options


ACTIONS: dict[str, Callable[[], Parser]] = {
    "ask": ask,
    "import": import_file,
    "show": show,
    "validate": validate,
    "update": update,
    "default": default,
}
"""The parsers of the actions."""
