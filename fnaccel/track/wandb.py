"""Metrics to Weights & Biases. The package is imported when a run starts, and not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnaccel.track.library import LibraryTracker, check_offline
from fnaccel.track.media import as_pictures
from fnaccel.track.tracker import Ranks
from fnaccel.world.paths import local_path


class WandbTracker(LibraryTracker):
    """Sends each step's metrics to a run of Weights & Biases.

    A run that the script began with `wandb.init` is used, and left running.

    Args:
        project, run_name: of the run. By default wandb chooses.
        mode: `"online"`, `"offline"` or `"disabled"`. By default the value of WANDB_MODE.
        directory: the folder for its local files, which wandb calls `dir`.
        offline: True writes to this machine, as `mode="offline"`. Nothing needs a network or a key then.
            False: as `mode="online"`.
        ranks: the ranks that write. With `"all"` each rank has a run of its own.
        options: further arguments of `wandb.init` (https://docs.wandb.ai/ref/python/init), such as `entity`
            and `tags`.

    Example:
        >>> from fnaccel.track import WandbTracker
        >>> tracker = WandbTracker(project="gpt", mode="disabled")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
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
        self._name = options.pop("name", None) if run_name is None else run_name
        self._further = tuple(options)
        if offline is not None:
            check_offline("WandbTracker", offline, {"mode": mode})
            mode = "offline" if offline else "online"
        self.options: dict[str, Any] = {"project": project, "mode": mode, **options}
        if directory is not None:
            self.options["dir"] = str(local_path(directory, "WandbTracker"))
        self._began = False
        self._wandb: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run, or join the run that the script began. `config` is shown beside it.

        Raises:
            MissingBackendError: wandb is not installed.
        """
        self._wandb = self._import("wandb", "wandb")
        self._check_options(self._further, self._wandb.init)
        self._began = self._wandb.run is None
        if self._began:
            if "dir" in self.options:  # wandb takes another folder if this one is missing
                Path(self.options["dir"]).mkdir(parents=True, exist_ok=True)
            self._run = self._wandb.init(config=dict(config), name=self._named(self._name), **self.options)
        else:
            self._run = self._wandb.run
            self.add_config(config)

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Add entries to the config of the run."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, Any], **options: Any) -> None:
        """Send one step's metrics.

        Args:
            step: the step.
            metrics: numbers and text.
            options: further arguments of `wandb.Run.log`, such as `commit`.

        Raises:
            ArgumentError: before `start`, or after `finish`.
        """
        run = self._started("log")
        numbers, texts = self._numbers_and_texts(metrics)
        run.log({**numbers, **texts}, step=step, **options)

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        run = self._started("log_images")
        run.log({name: [self._wandb.Image(picture) for picture in as_pictures(images)]}, step=step)

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib as an image."""
        self._started("log_figure").log({name: self._wandb.Image(figure)}, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table."""
        run = self._started("log_table")
        run.log({name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Keep a file as an artifact of type `file`."""
        run = self._started("log_artifact")
        artifact = self._wandb.Artifact(name or Path(path).name, type="file")
        artifact.add_file(str(path))
        run.log_artifact(artifact)

    def finish(self) -> None:
        """End the run if `start` began it. All metrics are sent when this returns."""
        run, self._run = self._run, None
        if run is not None and self._began:
            run.finish()
