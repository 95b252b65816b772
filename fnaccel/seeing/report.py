"""A report of one or several runs: one HTML page that needs nothing else, readable on a phone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fnaccel.seeing.paths import require_page
from fnaccel.seeing.report_page import page
from fnaccel.seeing.runs import find_runs
from fnaccel.track.jsonl import JsonlTracker


def write_report(
    runs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    title: str = "",
) -> Path:
    """Write a page about runs: curves, the plan, the environment, and how the configurations differ.

    Args:
        runs: logs of `JsonlTracker`, or folders with logs. Several are drawn side by side.
        path: of the page. An old page is replaced as a whole.
        title: by default the names of the runs.

    Returns:
        The path.

    Raises:
        ArgumentError: no logs, a log without a step, or a path that is a folder or ends in `.jsonl`.
        OSError: the page can't be written.

    Example:
        >>> tracker = fa.track.JsonlTracker("gpt.jsonl")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), trackers=tracker):
        ...     pass
        >>> fa.seeing.write_report("gpt.jsonl", "report.html").name
        'report.html'
    """
    require_page(path, "fnaccel report")
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    text = page(find_runs(paths), title)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


class ReportTracker:
    """Writes a page at the end of a run, and a JSONL log beside it while the run goes on.

    A run that is started again goes on in the same log, and so in the page.

    Args:
        path: of the page. The log has the same name with the ending `.jsonl`.

    Raises:
        ArgumentError: the path is a folder, or ends in `.jsonl`.

    Example:
        >>> tracker = fa.seeing.ReportTracker("report.html")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), trackers=tracker):
        ...     pass
        >>> from pathlib import Path
        >>> "Loss" in Path("report.html").read_text()
        True
    """

    in_loop = True  # as its log is

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_page(path, "ReportTracker")
        self.path = Path(path)
        self._log = JsonlTracker(self.path.with_suffix(".jsonl"))
        self._steps = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the log, or go on with it."""
        self._steps = 0
        self._log.start(config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics to the log."""
        self._log.log(step, metrics)
        self._steps += 1

    def finish(self) -> None:
        """Close the log, and write the page if a step was logged."""
        self._log.finish()
        if self._steps:
            write_report(self._log.path, self.path)
