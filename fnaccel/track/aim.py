"""Metrics to Aim: a local repository, or an Aim server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_picture, as_pictures
from fnaccel.track.plain import markdown_table, plain
from fnaccel.track.tracker import Ranks
from fnaccel.world.paths import optional_path


class AimTracker(LibraryTracker):
    """Writes each step's metrics to a repository of Aim. The config is the run's `config`.

    Args:
        project: the experiment's name. By default Aim chooses.
        run_name: the name of the run. By default Aim chooses.
        directory: the folder of the repository, or `aim://HOST:PORT` of a server. A folder needs no network.
            By default the working directory.
        offline: True: a folder, and not a server.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `aim.Run`, such as `run_hash`, `system_tracking_interval` and
            `capture_terminal_logs`.

    Example:
        >>> from fnaccel.track import AimTracker
        >>> tracker = AimTracker(project="gpt", directory="runs/gpt", system_tracking_interval=None)
        >>> tracker.ranks
        'main'
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ranks)
        self._project, self._name = project, run_name
        remote = str(directory).startswith("aim://")
        self._directory = str(directory if remote else optional_path(directory, "AimTracker") or "") or None
        check_offline("AimTracker", offline, {"directory": remote and directory})
        self.options = options
        self._aim: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run.

        Raises:
            MissingBackendError: aim is not installed.
        """
        self._aim = self._import("aim", "aim")
        self._check_options(self.options, self._aim.Run)
        repository = self._directory
        if repository is not None and "://" not in repository:
            Path(repository).mkdir(parents=True, exist_ok=True)
        self._run = self._aim.Run(repo=repository, experiment=self._project, **self.options)
        name = self._named(self._name)
        if name is not None:
            self._run.name = name
        self._run["config"] = plain(config)

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Write one step's metrics. Text is an `aim.Text`.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of `aim.Run.track`, such as `context`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        run = self._started("log")
        numbers, texts = self._numbers_and_texts(metrics)
        for name, value in numbers.items():
            run.track(value, name=name, step=step, **options)
        for name, text in texts.items():
            run.track(self._aim.Text(text), name=name, step=step, **options)

    def _writer(self) -> Callable[..., Any]:
        return self._run.track

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        run = self._started("log_images")
        run.track([self._aim.Image(picture) for picture in as_pictures(images)], name=name, step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure").track(self._aim.Image(as_picture(figure)), name=name, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table as text."""
        self._started("log_table").track(self._aim.Text(markdown_table(columns, rows)), name=name, step=step)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file in the folder `aim_artifacts` of the repository, or where `set_artifacts_uri` says."""
        run = self._started("log_artifact")
        if run.artifacts_uri is None:
            folder = Path(self._directory or ".").absolute() / "aim_artifacts"
            run.set_artifacts_uri(folder.as_uri())
        run.log_artifact(str(path), name or Path(path).name, block=True)

    def finish(self) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.close()
