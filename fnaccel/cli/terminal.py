"""What commands share: options whose errors have three parts, and text that is safe for a terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fnaccel.errors import ArgumentError, FnaccelError
from fnaccel.world.paths import local_path


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations of options. Its errors are of the class `failure`."""

    failure: type[FnaccelError] = ArgumentError

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        # the description keeps its lines
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, formatter_class=style, allow_abbrev=False)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - overloads of one signature
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, and check that paths are paths of this machine."""
        parsed, remaining = super().parse_known_args(args, namespace)
        for value in vars(parsed).values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    local_path(path, self.prog)
        return parsed, remaining

    def option_names(self) -> list[str]:
        """The names of all options, those that the help leaves out excepted."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of an exit."""
        raise self.failure(message, where=self.prog, fix=f"{self.prog} --help shows the options")


def printable(text: str, keep: str = "") -> str:
    r"""`text` with control characters written out, such as `\x1b[31m`.

    Args:
        text: anything.
        keep: characters that stay, such as `"\n"`.

    Example:
        >>> printable("a\x1b[2J")
        'a\\x1b[2J'
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def columns(lines: Sequence[Sequence[str]], alignment: str) -> str:
    """Cells in columns, safe for a terminal. The last column is neither aligned nor padded.

    Args:
        lines: cells, as many in each line.
        alignment: `"<"` or `">"` for each column but the last.

    Example:
        >>> print(columns([("a", "1", "one"), ("bcd", "20", "twenty")], "<>"))
        a     1  one
        bcd  20  twenty
    """
    safe = [[*map(printable, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)][:-1]
    shape = "  ".join(f"{{:{side}{width}}}" for side, width in zip(alignment, widths, strict=True))
    return "\n".join(f"{shape}  {{}}".format(*line).rstrip() for line in safe)


def split_list(text: str) -> list[str]:
    """The entries of a list that is separated by commas. Commas inside parentheses are part of an entry.

    Example:
        >>> split_list("ddp, hsdp(2, 4)")
        ['ddp', 'hsdp(2, 4)']
    """
    entries, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            entries.append("")
        else:
            entries[-1] += char
    return [entry.strip() for entry in entries if entry.strip()]


def print_json(value: object) -> None:
    """Print a value as JSON on lines of its own. Values that JSON lacks become text."""
    print(json.dumps(value, indent=1, default=str))
