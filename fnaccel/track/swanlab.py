"""Metrics to SwanLab: online, or to files that are synchronised later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fnaccel.track.library import ValueTracker
from fnaccel.track.plain import plain


class SwanLabTracker(ValueTracker):
    """Sends each step's metrics to a run of SwanLab. Text is a `swanlab.Text`.

    A run that the script began with `swanlab.init` is used, and left running.

    Args:
        project: the project. By default the name of the working directory.
        run_name: the name of the run. By default SwanLab chooses.
        directory: the folder of its files, which SwanLab calls `log_dir`.
        offline: True writes to this machine, as `mode="offline"`. False: as `mode="online"`.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `swanlab.init`, such as `workspace`, `tags`, `description` and `mode`:
            `"online"`, `"local"`, `"offline"` or `"disabled"`, by default the value of SWANLAB_MODE, or
            online. `"local"` and `"offline"` need no network or key.

    Example:
        >>> from fnaccel.track import SwanLabTracker
        >>> tracker = SwanLabTracker(project="gpt", mode="offline", directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    _module = "swanlab"
    _online_option = ("mode", "online", "offline")

    def _current(self) -> Any:
        return self._library.get_run() if self._library.has_run() else None

    def _begin(self, config: Mapping[str, Any]) -> Any:
        options = {"project": self._project, **self._options_with_folder("log_dir")}
        options = {name: value for name, value in options.items() if value is not None}
        options |= {"config": plain(config), "name": self._named(self._name)}
        # begun in the main thread, a run takes over SIGINT and can't end in the thread of this tracker
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._library.init, **options).result()

    def _join(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(plain(config))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        self._started("log_table")
        table = self._library.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        self._put(step, {name: table})
