"""`fnaccel completion`: a script for a shell, from the parsers of all commands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnaccel.cli.options import COMMANDS
from fnaccel.cli.options.completion import parser
from fnaccel.cli.terminal import print_json
from fnaccel.errors import MissingBackendError, install_line


def run(arguments: Sequence[str]) -> int:
    """Print the script.

    Raises:
        MissingBackendError: shtab is not installed.
    """
    options = parser().parse_args(arguments)
    try:
        import shtab  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingBackendError(
            "shell completion is written by shtab, which is not installed",
            where="fnaccel completion",
            fix=install_line("cli"),
        ) from None
    script = shtab.complete(whole_parser(shtab.FILE), options.shell)
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print(script)
    return 0


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its words, such as `"config show"`."""
    by_words: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        module = importlib.import_module(f"fnaccel.cli.options.{command}")
        by_words[command] = module.parser()
        actions = getattr(module, "ACTIONS", {})
        by_words |= {f"{command} {action}": make() for action, make in actions.items()}
    return by_words


def whole_parser(file: Any) -> argparse.ArgumentParser:
    """One parser of all commands.

    Args:
        file: the attribute `complete` of options that name a file.
    """
    root = argparse.ArgumentParser("fnaccel")
    groups: dict[str, Any] = {"": root.add_subparsers()}
    for words, options in parsers().items():
        above, _, name = words.rpartition(" ")
        for action in options._actions:  # noqa: SLF001 - argparse has no public list of them
            if action.type is Path or action.metavar == "FILE" or action.dest == "script":
                action.complete = file  # pyright: ignore[reportAttributeAccessIssue]
        group = groups[above]
        command = group.add_parser(
            name, parents=[options], add_help=False, help=(options.description or "").split("\n")[0]
        )
        if any(other.startswith(f"{words} ") for other in parsers()):
            groups[words] = command.add_subparsers()
    return root
