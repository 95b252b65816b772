"""The options of `fnaccel plan`."""

from __future__ import annotations

from fnaccel.cli.options.subject import REFERENCES, add_subject
from fnaccel.cli.terminal import Parser

_HELP = f"""Print the plan of a train step of LOSS, and the memory and the collectives of a rank.

No ranks are started, and the model is built without values.
{REFERENCES}"""


def parser() -> Parser:
    """The options of `fnaccel plan`."""
    options = Parser("fnaccel plan", _HELP)
    add = options.add_argument
    add_subject(options)
    add("-n", "--ranks", type=int, default=1, help="how many ranks there would be (default: 1)")
    add("--per-machine", type=int, metavar="RANKS", help="how many of them on one machine (default: all)")
    add("--json", action="store_true", help="print JSON")
    return options
