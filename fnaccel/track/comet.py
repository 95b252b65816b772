"""Metrics to Comet: online, or as an archive that is uploaded later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker
from fnaccel.track.media import named_pictures
from fnaccel.track.plain import flat
from fnaccel.world.environment import set_default

_OF_START = {"api_key", "workspace", "experiment_key", "mode", "online"}
"""Options of `comet_ml.start` itself. The other options belong to its `ExperimentConfig`."""


class CometTracker(LibraryTracker):
    """Sends each step's metrics to an experiment of Comet. The config becomes its parameters.

    Text is kept by `log_text`, with its name in the metadata. The options of one call are those of
    `Experiment.log_metrics`, such as `epoch` and `prefix`.

    Comet's automatic logging is off, unless COMET_DISABLE_AUTO_LOGGING is set to 0, or the script imports
    `comet_ml` first.

    Args:
        project: the project. By default the value of COMET_PROJECT_NAME.
        run_name: the name of the experiment. By default Comet chooses.
        directory: the folder of the archive of `offline=True`.
        offline: True writes an archive (zip) that `comet upload` sends later. Nothing needs a network or a
            key then. By default the value of COMET_START_ONLINE, or online.
        ranks: the ranks that write. With `"all"` each rank has an experiment of its own.
        options: further arguments of `comet_ml.start` (`api_key`, `workspace`, `experiment_key`, `mode`,
            `online`), and of `comet_ml.ExperimentConfig`, such as `tags` and `log_code`.

    Example:
        >>> from fnaccel.track import CometTracker
        >>> tracker = CometTracker(project="gpt", online=False, directory="runs/gpt")
        >>> tracker.ranks
        'main'
    """

    _module = "comet_ml"
    _extra = "comet"
    _starters = ("start", "ExperimentConfig")
    _writer = "log_metrics"
    _closer = "end"
    _online_option = ("online", True, False)
    _is_absolute = True

    def _load(self) -> Any:
        # with its automatic logging an experiment ends, without an error, when MLflow begins a run
        set_default("COMET_DISABLE_AUTO_LOGGING", "1")
        return super()._load()

    def _begin(self, config: Mapping[str, Any]) -> Any:
        options = self._options_with_folder("offline_directory")
        of_start = {name: options.pop(name) for name in _OF_START & options.keys()}
        settings = self._library.ExperimentConfig(name=self._named(self._name), **options)
        experiment = self._library.start(project=self._project, experiment_config=settings, **of_start)
        experiment.log_parameters(flat(config))
        return experiment

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        numbers, texts = self._numbers_and_texts(metrics)
        self._run.log_metrics(numbers, step=step, **options)
        for name, text in texts.items():
            self._run.log_text(text, step=step, metadata={"name": name})

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        experiment = self._started("log_images")
        for key, picture in named_pictures(name, images):
            experiment.log_image(picture, name=key, step=step)

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
