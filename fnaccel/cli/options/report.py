"""The options of `fnaccel report`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.cli.terminal import Parser

_HELP = """One HTML page about one or several runs, from their JSONL logs.

Curves of loss, learning rate, gradient norm, speed and memory, the plan, the environment, and how
configurations differ. The page needs no other file and no network."""


def parser() -> Parser:
    """The options of `fnaccel report`."""
    options = Parser("fnaccel report", _HELP)
    options.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a log of JsonlTracker, or a folder with logs"
    )
    options.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html beside the first run)",
    )
    options.add_argument("--title", default="", help="default: the names of the runs")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options
