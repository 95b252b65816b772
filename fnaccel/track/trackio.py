"""Metrics to Trackio: a local database, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_picture, as_pictures
from fnaccel.track.plain import plain
from fnaccel.track.tracker import Ranks
from fnaccel.world.environment import with_default, without_variables
from fnaccel.world.paths import local_path


class TrackioTracker(LibraryTracker):
    """Writes each step's metrics to a run of Trackio. Look at them with `trackio show`.

    Args:
        project: the project.
        run_name: the name of the run. By default Trackio chooses.
        directory: the folder of its databases, if TRACKIO_DIR is not set. Trackio has one folder in a
            process, which it reads when it is imported first.
        offline: True: nothing goes over the network, whatever TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `trackio.init`. With `space_id` or `server_url` metrics go over the
            network, without them nothing does.

    Example:
        >>> from fnaccel.track import TrackioTracker
        >>> tracker = TrackioTracker(project="gpt", directory="runs/gpt", auto_log_cpu=False)
        >>> tracker.ranks
        'main'
    """

    def __init__(
        self,
        *,
        project: str = "fnaccel",
        run_name: str | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ranks)
        self._name = run_name
        self._directory = None if directory is None else local_path(directory, "TrackioTracker").absolute()
        servers = {name: options.get(name) for name in ("space_id", "server_url", "dataset_id", "bucket_id")}
        check_offline("TrackioTracker", offline, servers)
        self._offline, self._further = offline, tuple(options)
        self.options: dict[str, Any] = {"project": project, **options}
        self._trackio: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run.

        Raises:
            MissingBackendError: trackio is not installed.
        """
        folder = None if self._directory is None else str(self._directory)
        with with_default("TRACKIO_DIR", folder):  # Trackio reads it when it is imported, and not later
            self._trackio = self._import("trackio", "trackio")
        self._check_options(self._further, self._trackio.init)
        names = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if self._offline else ()
        with without_variables(*names):
            self._run = self._trackio.init(name=self._named(self._name), config=plain(config), **self.options)

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Write one step's metrics. Text is a `trackio.Markdown`.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of the run's `log`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        run = self._started("log")
        numbers, texts = self._numbers_and_texts(metrics)
        shown = {name: self._trackio.Markdown(text) for name, text in texts.items()}
        run.log({**numbers, **shown}, step=step, **options)

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        run = self._started("log_images")
        pictures = as_pictures(images)
        for number, picture in enumerate(pictures):
            key = name if len(pictures) == 1 else f"{name}/{number}"
            run.log({key: self._trackio.Image(picture)}, step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure").log({name: self._trackio.Image(as_picture(figure))}, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        run = self._started("log_table")
        table = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        run.log({name: table}, step=step)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file."""
        self._started("log_artifact").log_artifact(str(path), name=name or Path(path).stem)

    def finish(self) -> None:
        """End the run. All metrics are written when this returns."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
