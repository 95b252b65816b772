"""A report of one or several runs: one HTML page that needs nothing else, readable on a phone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fnaccel.seeing.report_page import page
from fnaccel.seeing.runs import find_runs
from fnaccel.track.jsonl import JsonlTracker
from fnaccel.world.paths import output_file, replace_file, require_page


def write_report(
    runs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    title: str = "",
) -> Path:
    """Write a page about runs: curves, the plan, the environment, and how the configurations differ.

    Args:
        runs: logs of `JsonlTracker`, or folders with logs. Several are drawn side by side.
        path: of the page. An old page is replaced as a whole. Links are followed.
        title: by default the names of the runs.

    Returns:
        The path.

    Raises:
        ArgumentError: no logs, a log without a step, a path that is no regular file or ends in `.jsonl`, or
            a page that can't be written.

    Example:
        >>> tracker = fa.track.JsonlTracker("gpt.jsonl")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
        >>> fa.seeing.write_report("gpt.jsonl", "report.html").name
        'report.html'
    """
    require_page(path, "fnaccel report")
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    text = page(find_runs(paths), title)
    replace_file(path, text, "fnaccel report")
    return Path(path)


def log_of(page: str | os.PathLike[str]) -> Path:
    """The log beside a page, which `ReportTracker` writes.

    Raises:
        ArgumentError: the page or its log is no regular file: see `require_page`.
    """
    require_page(page, "fa.Tracking(report=)")
    log = Path(page).with_suffix(".jsonl")
    output_file(log, "fa.Tracking(report=)")
    return log


class ReportTracker:
    """Writes a page at the end of a run, and a JSONL log beside it while the run goes on.

    A run that is started again goes on in the same log, and so in the page.

    Args:
        path: of the page. The log has the same name with the ending `.jsonl`.

    Raises:
        ArgumentError: the path or that of the log is no regular file, or the path ends in `.jsonl`.

    Example:
        >>> tracker = fa.seeing.ReportTracker("report.html")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
        >>> from pathlib import Path
        >>> "Loss" in Path("report.html").read_text()
        True
    """

    in_loop = True  # as its log is

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = JsonlTracker(log_of(path))
        self.path = Path(path)
        self._steps = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the log, or go on with it."""
        self._steps = 0
        self._log.start(config)
        self.add_config = self._log.add_config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics to the log."""
        self._log.log(step, metrics)
        self._steps += 1

    def finish(self) -> None:
        """Close the log, and write the page if a step was logged."""
        self._log.finish()
        if self._steps:
            write_report(self._log.path, self.path)
