"""Metrics to SwanLab: online, or to files that are synchronised later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_picture, as_pictures
from fnaccel.track.plain import plain
from fnaccel.track.tracker import Ranks
from fnaccel.world.paths import local_path


class SwanLabTracker(LibraryTracker):
    """Sends each step's metrics to a run of SwanLab.

    A run that the script began with `swanlab.init` is used, and left running.

    Args:
        project: the project. By default the name of the working directory.
        run_name: the name of the run. By default SwanLab chooses.
        mode: `"online"`, `"local"`, `"offline"` or `"disabled"`. By default the value of SWANLAB_MODE, or
            online. `"local"` and `"offline"` need no network or key.
        directory: the folder of its files, which SwanLab calls `log_dir`.
        offline: True writes to this machine, as `mode="offline"`. False: as `mode="online"`.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `swanlab.init`, such as `workspace`, `tags` and `description`.

    Example:
        >>> from fnaccel.track import SwanLabTracker
        >>> tracker = SwanLabTracker(project="gpt", mode="offline", directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        mode: str | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ranks)
        self._name = run_name
        self._further = tuple(options)
        if offline is not None:
            check_offline("SwanLabTracker", offline, {"mode": mode})
            mode = "offline" if offline else "online"
        self.options: dict[str, Any] = {"project": project, "mode": mode, **options}
        if directory is not None:
            self.options["log_dir"] = str(local_path(directory, "SwanLabTracker"))
        self._began = False
        self._swanlab: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run, or join the run that the script began.

        Raises:
            MissingBackendError: swanlab is not installed.
        """
        self._swanlab = self._import("swanlab", "swanlab")
        self._check_options(self._further, self._swanlab.init)
        self._began = not self._swanlab.has_run()
        if self._began:
            if "log_dir" in self.options:
                Path(self.options["log_dir"]).mkdir(parents=True, exist_ok=True)
            options = {name: value for name, value in self.options.items() if value is not None}
            options |= {"config": plain(config), "name": self._named(self._name)}
            # begun in the main thread, a run takes over SIGINT and can't end in the thread of this tracker
            with ThreadPoolExecutor(1) as thread:
                self._run = thread.submit(self._swanlab.init, **options).result()
        else:
            self._run = self._swanlab.get_run()
            self._run.config.update(plain(config))

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Send one step's metrics. Text is a `swanlab.Text`.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of the run's `log`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        run = self._started("log")
        numbers, texts = self._numbers_and_texts(metrics)
        shown = {name: self._swanlab.Text(text) for name, text in texts.items()}
        run.log({**numbers, **shown}, step=step, **options)

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        run = self._started("log_images")
        run.log({name: [self._swanlab.Image(picture) for picture in as_pictures(images)]}, step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure").log({name: self._swanlab.Image(as_picture(figure))}, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        run = self._started("log_table")
        table = self._swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        run.log({name: table}, step=step)

    def finish(self) -> None:
        """End the run if `start` began it. All metrics are sent, or on disk, when this returns."""
        run, self._run = self._run, None
        if run is not None and self._began:
            run.finish()
