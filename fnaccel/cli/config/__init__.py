"""`fnaccel config`: asks for, imports, shows, checks and writes recipes. Nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence

from fnaccel import _lazy
from fnaccel.cli.options.config import ACTIONS, parser
from fnaccel.errors import UnknownNameError, nearest

_MODULES = {action: action for action in ACTIONS} | {"import": "importing"}


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
    action, *words = arguments or ["ask"]
    if action in ("-h", "--help"):
        parser().parse_args([action])
    if action.startswith("-"):
        action, words = "ask", list(arguments)
    if action not in ACTIONS:
        raise UnknownNameError(
            f"no action is called {action!r}", where="fnaccel config", fix=nearest(action, ACTIONS)
        )
    if {"-h", "--help"} & set(words):
        ACTIONS[action]().parse_args(words)
    # by name, so that an action does not pay for the imports of another
    result: int = _lazy.load(f"fnaccel.cli.config.{_MODULES[action]}").run(words)
    return result
