"""`fnaccel report`: one HTML page about one or several runs, from their JSONL logs.

Curves of loss, learning rate, gradient norm, speed and memory, the plan, the environment, and how
configurations differ. The page needs no other file and no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fnaccel.cli.options.report import parser
from fnaccel.seeing.report import write_report


def run(arguments: Sequence[str]) -> int:
    """Write a page and print its path.

    Raises:
        ArgumentError: no logs.
    """
    options = parser().parse_args(arguments)
    first = options.runs[0]
    output = options.output or (first if first.is_dir() else first.parent) / "report.html"
    path = write_report(options.runs, output, options.title)
    print(json.dumps({"report": str(path)}) if options.json else path)
    return 0
