"""Metrics to Trackio: a local database, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnaccel.track.library import ValueTracker
from fnaccel.track.media import named_pictures
from fnaccel.track.plain import plain
from fnaccel.world.environment import with_default, without_variables


class TrackioTracker(ValueTracker):
    """Writes each step's metrics to a run of Trackio. Look at them with `trackio show`.

    Text is a `trackio.Markdown`.

    Args:
        project: the project, by default `fnaccel`.
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

    _module = "trackio"
    _server_options = ("space_id", "server_url", "dataset_id", "bucket_id")
    _is_absolute = True

    def _load(self) -> Any:
        folder = None if self._directory is None else str(self._directory)
        with with_default("TRACKIO_DIR", folder):  # Trackio reads it when it is imported, and not later
            return super()._load()

    def _begin(self, config: Mapping[str, Any]) -> Any:
        variables = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if self._offline else ()
        project, name = self._project or "fnaccel", self._named(self._name)
        with without_variables(*variables):
            return self._library.init(project=project, name=name, config=plain(config), **self.options)

    def _text(self, text: str) -> Any:
        return self._library.Markdown(text)

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        self._started("log_images")
        for key, picture in named_pictures(name, images):
            self._put(step, {key: self._library.Image(picture)})

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file."""
        self._started("log_artifact").log_artifact(str(path), name=name or Path(path).stem)
