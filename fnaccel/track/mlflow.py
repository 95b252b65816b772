"""Metrics to MLflow: a tracking server, or a local database."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker
from fnaccel.track.media import named_pictures
from fnaccel.track.plain import flat
from fnaccel.track.tracker import Ranks

_LONGEST = 6_000
"""Characters that MLflow takes as the value of a parameter."""
_MOST = 100
"""Parameters that MLflow takes in one request."""


class MLflowTracker(LibraryTracker):
    """Sends each step's metrics to a run of MLflow. The config becomes the run's parameters.

    Text is kept as the file `NAME/STEP.txt`. The options of one call are those of `mlflow.log_metrics`, such
    as `synchronous` and `timestamp`.

    A run that the script began with `mlflow.start_run` is used, and left running.

    Args:
        project: the experiment. It is made if it is missing. By default MLflow chooses.
        run_name: the name of the run. By default MLflow chooses.
        tracking_uri: a server or a database. By default the one that MLFLOW_TRACKING_URI or
            `mlflow.set_tracking_uri` names.
        directory: if no tracking URI is set: a folder for a local database `mlflow.db` and the files of the
            run. Nothing needs a network then.
        offline: True: a local database in `directory`, or without one in `runs`, whatever
            MLFLOW_TRACKING_URI says.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `mlflow.start_run`, such as `run_id`, `tags`, `nested` and
            `description`.

    Example:
        >>> from fnaccel.track import MLflowTracker
        >>> tracker = MLflowTracker(project="gpt", directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    _module = "mlflow"
    _starters = ("start_run",)
    _is_absolute = True

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        self._uri = tracking_uri
        super().__init__(
            project=project, run_name=run_name, directory=directory, ranks=ranks, offline=offline, **options
        )
        if offline and tracking_uri is None and self._directory is None:
            self._directory = Path("runs").absolute()
        self._ended: str | None = None

    def _servers(self) -> dict[str, Any]:
        uri = str(self._uri)
        is_remote = "://" in uri and not uri.startswith(("sqlite:", "file:"))
        return {"tracking_uri": uri if is_remote else None}

    def _current(self) -> Any:
        return self._library.active_run()

    def _begin(self, config: Mapping[str, Any]) -> Any:
        local = None
        if self._uri is not None:
            self._library.set_tracking_uri(self._uri)
        elif self._directory is not None and (self._offline or not self._library.is_tracking_uri_set()):
            local = self._directory
            local.mkdir(parents=True, exist_ok=True)
            self._library.set_tracking_uri(f"sqlite:///{local / 'mlflow.db'}")
        options = dict(self.options)
        if "experiment_id" not in options and (self._project is not None or local is not None):
            options["experiment_id"] = self._experiment(self._project or "fnaccel", local)
        self._run = self._library.start_run(run_name=self._named(self._name), **options)
        self._join(config)
        return self._run

    def _experiment(self, name: str, local: Path | None) -> str:
        known = self._library.get_experiment_by_name(name)
        if known is not None:
            return known.experiment_id
        files = None if local is None else (local / "mlartifacts").as_uri()
        return self._library.create_experiment(name, artifact_location=files)

    def _join(self, config: Mapping[str, Any]) -> None:
        values = [(name, str(value)[:_LONGEST]) for name, value in flat(config).items()]
        for first in range(0, len(values), _MOST):
            self._library.log_params(dict(values[first : first + _MOST]), run_id=self._id)

    @property
    def _id(self) -> str:
        return self._run.info.run_id

    def _client(self, method: str) -> Any:
        self._started(method)
        return self._library.MlflowClient()

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        numbers, texts = self._numbers_and_texts(metrics)
        client = self._library.MlflowClient()
        if numbers:  # MLflow refuses names with other characters, such as the patterns of groups
            numbers = {re.sub(r"[^\w/.: -]", "_", name): value for name, value in numbers.items()}
            self._library.log_metrics(numbers, step=step, run_id=self._id, **options)
        for name, text in texts.items():
            client.log_text(self._id, text, f"{name}/{step}.txt")

    def _write_function(self) -> Callable[..., Any]:
        return self._library.log_metrics

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        client = self._client("log_images")
        for key, picture in named_pictures(name, images):
            client.log_image(self._id, picture, key=key, step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Keep a figure of matplotlib as `NAME/STEP.png`."""
        self._client("log_figure").log_figure(self._id, figure, f"{name}/{step}.png")

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Keep a table as `NAME/STEP.json`."""
        values = {column: [row[at] for row in rows] for at, column in enumerate(columns)}
        self._client("log_table").log_table(self._id, values, f"{name}/{step}.json")

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file: in the folder `name` of the run's files, or in their root."""
        self._client("log_artifact").log_artifact(self._id, str(path), name)

    def _close(self, run: Any) -> None:
        self._ended = run.info.run_id
        self._library.MlflowClient().set_terminated(self._ended)
        self.release()

    def release(self) -> None:
        """End the run for MLflow in the thread that began it. MLflow has an active run for each thread."""
        active = self._library.active_run()
        if active is not None and active.info.run_id == self._ended:
            self._library.end_run()
