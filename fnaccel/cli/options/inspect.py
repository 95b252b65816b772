"""The options of `fnaccel inspect`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.cli.terminal import Parser

_HELP = (
    """`fnaccel inspect`: the contents of a checkpoint, without a model and without executing code from it."""
)


def parser() -> Parser:
    """The options of `fnaccel inspect`."""
    options = Parser("fnaccel inspect", _HELP)
    options.add_argument(
        "path", type=Path, metavar="PATH", help="of fa.save, or safetensors: a file or directory"
    )
    options.add_argument("--step", type=int, help="which step of a root (default: the newest)")
    options.add_argument(
        "--verify",
        action="store_true",
        help="read all files and compare their checksums. The exit code is 1 if one differs",
    )
    options.add_argument("--json", action="store_true", help="print JSON")
    return options
