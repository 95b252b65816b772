"""Metrics to ClearML: a server, or a session on disk that is imported later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker
from fnaccel.track.media import as_pictures
from fnaccel.track.plain import plain
from fnaccel.world.environment import set_default


class ClearMLTracker(LibraryTracker):
    """Sends each step's metrics to a task of ClearML. The config is connected to it.

    A metric `train/loss` is the series `loss` of the plot `train`. Text is a line of the task's console log.
    A task that the script began with `Task.init` is used, and left running. A task that the tracker begins
    reports from a thread, not a fork.

    Args:
        project: the project, by default `fnaccel`.
        run_name: the name of the task. By default ClearML takes the name of the script.
        offline: write a session on disk, which `Task.import_offline_session` sends later. Nothing needs a
            network or a key then. None leaves it to CLEARML_OFFLINE_MODE.
        directory: the folder of such a session, if CLEARML_CACHE_DIR is not set: `DIRECTORY/offline`.
        ranks: the ranks that write. With `"all"` each rank has a task of its own.
        options: further arguments of `clearml.Task.init`, such as `tags` and `output_uri`.

    Example:
        >>> from fnaccel.track import ClearMLTracker
        >>> tracker = ClearMLTracker(project="gpt", offline=True, directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    _module = "clearml"
    _starters = ("Task.init",)
    _closer = "close"
    _is_absolute = True

    def _current(self) -> Any:
        if self._directory is not None:
            set_default("CLEARML_CACHE_DIR", str(self._directory))
        return self._library.Task.current_task()

    def _begin(self, config: Mapping[str, Any]) -> Any:
        task = self._library.Task
        if self._offline is not None:
            task.set_offline(self._offline)
        # ClearML reports from a fork by default. A fork of a process with torch's threads can wait
        # forever, and `close` waits for it: this is `development.report_use_subprocess: false`
        task._report_subprocess_enabled = False  # noqa: SLF001 - it has no public name in Python
        project, name = self._project or "fnaccel", self._named(self._name)
        self._run = task.init(project_name=project, task_name=name, **self.options)
        self._join(config)
        return self._run

    def _join(self, config: Mapping[str, Any]) -> None:
        self._run.connect(plain(config), name="config")

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        numbers, texts = self._numbers_and_texts(metrics)
        logger = self._run.get_logger()
        for name, value in numbers.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, value, step, **options)
        for name, text in texts.items():
            logger.report_text(f"step {step}, {name}: {text}", print_console=False)

    def _write_function(self) -> Callable[..., Any]:
        return self._run.get_logger().report_scalar

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        logger = self._started("log_images").get_logger()
        for number, picture in enumerate(as_pictures(images)):
            logger.report_image(name, str(number), iteration=step, image=picture)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib."""
        self._started("log_figure").get_logger().report_matplotlib_figure(name, name, figure, step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        table = [list(columns), *(list(row) for row in rows)]
        self._started("log_table").get_logger().report_table(name, name, step, table_plot=table)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file."""
        self._started("log_artifact").upload_artifact(name or Path(path).name, str(path), wait_on_upload=True)
