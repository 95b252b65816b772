"""Metrics to ClearML: a server, or a session on disk that is imported later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_pictures
from fnaccel.track.plain import plain
from fnaccel.track.tracker import Ranks
from fnaccel.world.environment import set_default
from fnaccel.world.paths import local_path


class ClearMLTracker(LibraryTracker):
    """Sends each step's metrics to a task of ClearML. The config is connected to it.

    A metric `train/loss` is the series `loss` of the plot `train`. A task that the script began with
    `Task.init` is used, and left running. A task that the tracker begins reports from a thread, not a fork.

    Args:
        project: the project.
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

    def __init__(
        self,
        *,
        project: str = "fnaccel",
        run_name: str | None = None,
        offline: bool | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        **options: Any,
    ) -> None:
        super().__init__(ranks)
        self._name, self._offline = run_name, offline
        self._directory = None if directory is None else local_path(directory, "ClearMLTracker").absolute()
        check_offline("ClearMLTracker", offline, {})
        self._further = tuple(options)
        self.options: dict[str, Any] = {"project_name": project, **options}
        self._began = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the task, or join the task that the script began.

        Raises:
            MissingBackendError: clearml is not installed.
        """
        task: Any = self._import("clearml", "clearml").Task
        self._check_options(self._further, task.init)
        if self._directory is not None:
            set_default("CLEARML_CACHE_DIR", str(self._directory))
        current = task.current_task()
        self._began = current is None
        if current is None:
            if self._offline is not None:
                task.set_offline(self._offline)
            # ClearML reports from a fork by default. A fork of a process with torch's threads can wait
            # forever, and `close` waits for it: this is `development.report_use_subprocess: false`
            task._report_subprocess_enabled = False  # noqa: SLF001 - it has no public name in Python
            current = task.init(task_name=self._named(self._name), **self.options)
        self._run = current
        self._run.connect(plain(config), name="config")

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Send one step's metrics. Text is a line of the task's console log.

        Args:
            step: the step.
            metrics: numbers and text.
            options: none: ClearML has no further ones.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        logger = self._started("log").get_logger()
        numbers, texts = self._numbers_and_texts(metrics)
        for name, value in numbers.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, value, step, **options)
        for name, text in texts.items():
            logger.report_text(f"step {step}, {name}: {text}", print_console=False)

    def _writer(self) -> Callable[..., Any]:
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

    def finish(self) -> None:
        """End the task if `start` began it. All metrics are sent, or on disk, when this returns."""
        task, self._run = self._run, None
        if task is not None and self._began:
            task.close()
