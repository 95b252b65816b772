"""`fnaccel config`: asks for, imports, shows, checks and writes recipes. Nothing is launched."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from fnaccel.cli.terminal import Parser
from fnaccel.errors import UnknownNameError, nearest

_HELP = """Ask questions and write a recipe, or one of these actions:

  ask       ask questions, and write ./fnaccel.yaml from the answers (--answers FILE for scripts)
  import    a file of Accelerate, DeepSpeed or torchtitan as a recipe, key by key
  show      each value of the recipe that a launch would use, and its source
  validate  check a file: keys, kinds, names, and the values of the job
  update    bring a file of an older version up to date
  default   write ./fnaccel.yaml for this machine. A file that exists is kept"""
ACTIONS = {
    "ask": "asking.ask",
    "import": "config_import.run",
    "show": "config_show.run",
    "validate": "config_check.run",
    "update": "config_update.run",
    "default": "config_default.run",
}
"""Actions, and the functions of `fnaccel.cli` that run them."""


def run(arguments: Sequence[str]) -> int:
    """Run an action of `fnaccel config`. Without an action, ask questions.

    Args:
        arguments: after `fnaccel config`.

    Raises:
        UnknownNameError: no such action.
        ConfigError: the recipe has a mistake, or the file to write exists.
        LaunchError: the values of the section `launch` contradict each other.

    Example:
        >>> Path("gpt.yaml").write_text("strategy: ddp")
        >>> run(["validate", "gpt.yaml"])
        gpt.yaml is a recipe
        0
    """
    action, *rest = arguments or ["ask"]
    if action in ("-h", "--help"):
        usage = f"fnaccel config [{' | '.join(ACTIONS)}] ..."
        Parser("fnaccel config", _HELP, usage).parse_args([action])
    if action.startswith("-"):
        action, rest = "ask", list(arguments)
    if action not in ACTIONS:
        raise UnknownNameError(
            f"no action is called {action!r}", where="fnaccel config", fix=nearest(action, ACTIONS)
        )
    # by name, so that an action does not pay for the imports of another
    module, function = ACTIONS[action].split(".")
    result: int = getattr(importlib.import_module(f"fnaccel.cli.{module}"), function)(rest)
    return result
