"""The options of `fnaccel trace`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.cli.terminal import Parser

_HELP = """Each rank's share of compute, communication, waiting for data and idle time.

The traces are those of `fa.profile`, or of `fa.Watch(profile=)`."""


def parser() -> Parser:
    """The options of `fnaccel trace`."""
    options = Parser("fnaccel trace", _HELP)
    options.add_argument("action", choices=["summarize"], help="the only one so far")
    options.add_argument("directory", type=Path, help="of fa.profile")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options
