"""Metrics to Comet: online, or as an archive that is uploaded later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_pictures
from fnaccel.track.plain import flat
from fnaccel.track.tracker import Ranks
from fnaccel.world.environment import set_default
from fnaccel.world.paths import local_path

_OF_START = {"api_key", "workspace", "experiment_key", "mode"}
"""Options of `comet_ml.start` itself. The other options belong to its `ExperimentConfig`."""


class CometTracker(LibraryTracker):
    """Sends each step's metrics to an experiment of Comet. The config becomes its parameters.

    Comet's automatic logging is off, unless COMET_DISABLE_AUTO_LOGGING is set to 0, or the script imports
    `comet_ml` first.

    Args:
        project: the project. By default the value of COMET_PROJECT_NAME.
        run_name: the name of the experiment. By default Comet chooses.
        online: False writes an archive (zip) that `comet upload` sends later. Nothing needs a network or a
            key then. By default the value of COMET_START_ONLINE, or online.
        directory: the folder of that archive.
        offline: True: as `online=False`. False: as `online=True`.
        ranks: the ranks that write. With `"all"` each rank has an experiment of its own.
        options: further arguments of `comet_ml.start` (`api_key`, `workspace`, `experiment_key`, `mode`), and
            of `comet_ml.ExperimentConfig`, such as `tags` and `log_code`.

    Example:
        >>> from fnaccel.track import CometTracker
        >>> tracker = CometTracker(project="gpt", online=False, directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        online: bool | None = None,
        directory: str | Path | None = None,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ranks)
        self._name = run_name
        if offline is not None:
            check_offline("CometTracker", offline, {"online": online})
            online = not offline
        self.options: dict[str, Any] = {"project": project, "online": online}
        self.options |= {name: value for name, value in options.items() if name in _OF_START}
        self._further = tuple(options)
        self._settings = {name: value for name, value in options.items() if name not in _OF_START}
        if directory is not None:
            self._settings["offline_directory"] = str(local_path(directory, "CometTracker").absolute())

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the experiment.

        Raises:
            MissingBackendError: comet_ml is not installed.
        """
        # with its automatic logging an experiment ends, without an error, when MLflow begins a run
        set_default("COMET_DISABLE_AUTO_LOGGING", "1")
        comet_ml = self._import("comet_ml", "comet")
        self._check_options(self._further, comet_ml.start, comet_ml.ExperimentConfig)
        if "offline_directory" in self._settings:
            Path(self._settings["offline_directory"]).mkdir(parents=True, exist_ok=True)
        settings = comet_ml.ExperimentConfig(name=self._named(self._name), **self._settings)
        self._run = comet_ml.start(experiment_config=settings, **self.options)
        self._run.log_parameters(flat(config))

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Send one step's metrics. Text is kept by `log_text`, with its name in the metadata.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of `Experiment.log_metrics`, such as `epoch` and `prefix`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        experiment = self._started("log")
        numbers, texts = self._numbers_and_texts(metrics)
        experiment.log_metrics(numbers, step=step, **options)
        for name, text in texts.items():
            experiment.log_text(text, step=step, metadata={"name": name})

    def _writer(self) -> Callable[..., Any]:
        return self._run.log_metrics

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        experiment = self._started("log_images")
        pictures = as_pictures(images)
        for number, picture in enumerate(pictures):
            experiment.log_image(picture, name=name if len(pictures) == 1 else f"{name}/{number}", step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib."""
        self._started("log_figure").log_figure(name, figure, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Keep a table as `NAME_STEP.csv`."""
        experiment = self._started("log_table")
        experiment.log_table(f"{name}_{step}.csv", [list(row) for row in rows], headers=list(columns))

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file as an asset of the experiment."""
        self._started("log_artifact").log_asset(str(path), name or Path(path).name)

    def finish(self) -> None:
        """End the experiment. All metrics are sent, or in the archive, when this returns."""
        experiment, self._run = self._run, None
        if experiment is not None:
            experiment.end()
