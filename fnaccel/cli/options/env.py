"""The options of `fnaccel env`."""

from __future__ import annotations

from fnaccel.cli.terminal import Parser


def parser() -> Parser:
    """The options of `fnaccel env`."""
    options = Parser(
        "fnaccel env", "Versions, devices and the variables that fa.start and the launcher read."
    )
    options.add_argument("--json", action="store_true", help="print JSON")
    return options
